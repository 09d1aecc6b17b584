"""Data sources: class folders, manifests, Parquet, tar shards, IDX, CIFAR, VTAB, and published datasets by name."""

from vitrail.data.sources.detect import load_dataset

__all__ = ["load_dataset"]
