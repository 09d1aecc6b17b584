"""The model family: Vision Transformers of every published size, hybrids, and the ResNets they are compared with."""
