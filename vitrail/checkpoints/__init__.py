"""Other projects' names for the same weights: one key table per format, used both ways."""
