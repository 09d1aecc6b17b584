"""Datasets: sources, labels, preprocessing, augmentation, loading and checks."""
