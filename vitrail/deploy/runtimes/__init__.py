"""Runtimes that execute models, and the opening of model files."""
