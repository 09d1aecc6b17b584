"""Tensor files as bytes: safetensors, PyTorch archives and NumPy archives, checked when read and written atomically."""
