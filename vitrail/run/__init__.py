"""From a recipe to a run directory: everything below, wired together."""
