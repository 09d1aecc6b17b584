"""Data of every kind: class folders, manifests, Parquet, tar shards, IDX, CIFAR, and names that resolve by themselves."""

from vitrail.data.sources.reading import read

__all__ = ["read"]
