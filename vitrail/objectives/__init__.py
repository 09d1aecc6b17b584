"""Objectives: each turns a model and a batch into a loss."""
