"""Deployment of trained models: runtimes, verified export, batch prediction, image search.

These tables stand here because the options and help texts of the command line read them without importing PyTorch.
"""

RUNTIMES = ("torch", "onnx", "openvino")
RUNTIME_SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}  # of exported files, with the runtime of each
SUFFIXES = {runtime: suffix for suffix, runtime in RUNTIME_SUFFIXES.items()}
