"""The parts of a Vision Transformer, one per file: patches, positions, attention, block, pooling, head.

Each slot of a model is a small frozen dataclass, such as `Learned1D(at="every")`; its `build` returns the `torch.nn.Module`.
"""
