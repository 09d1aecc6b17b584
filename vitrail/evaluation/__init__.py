"""`vitrail evaluate`: a model's file and pictures in; numbers, predictions and a page out."""
