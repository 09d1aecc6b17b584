"""HTML pages of inspections and of model comparisons."""
