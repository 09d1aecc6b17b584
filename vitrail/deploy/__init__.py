"""Deployment of trained models: runtimes, verified export, batch prediction, image search.

`RUNTIME_SUFFIXES` stands here because the help texts of the command line read it without importing PyTorch.
"""

RUNTIME_SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}  # of exported files, with the runtime of each
