"""Training: one loop for every objective, on one process or on many machines."""
