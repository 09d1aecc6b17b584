"""Files of tensors, as bytes: safetensors, PyTorch's archives and NumPy's, read without trusting and written whole."""
