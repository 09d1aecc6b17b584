"""Runs: the setup, data, models and evaluation that turn a recipe into a run directory."""
