"""Formats of other projects: one key table per format, used in both directions."""
