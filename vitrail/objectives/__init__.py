"""What is learnt: each objective turns a model and a batch into a loss."""
