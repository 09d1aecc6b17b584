"""A model on its way to be used: runtimes, export with proof, and answers for many pictures."""
