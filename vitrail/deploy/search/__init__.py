"""Image search by the features of a model."""
