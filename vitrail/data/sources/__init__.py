"""Data sources: folders, manifests, Parquet, tar shards, IDX, CIFAR, VTAB, published datasets, Python objects."""

from vitrail.data.sources.detect import load_dataset

__all__ = ["load_dataset"]
