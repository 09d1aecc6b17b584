"""Atomic writes, JSON of dataclasses, text formatting and devices."""
