"""Predictions and features of many images, written to files."""
