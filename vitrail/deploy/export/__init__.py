"""Export of models for ONNX Runtime, OpenVINO and PyTorch."""
