"""Crops, augmentations and the pipelines that turn images into model inputs."""
