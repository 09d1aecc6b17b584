"""Model families: Vision Transformers of every published size, hybrids, and BiT ResNets."""
