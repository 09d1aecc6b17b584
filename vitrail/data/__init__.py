"""From files to what a model takes."""
