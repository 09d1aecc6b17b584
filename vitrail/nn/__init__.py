"""The parts of a Vision Transformer, one idea a file: patches, positions, attention, block, pooling, head.

Each slot of the model is filled by a small frozen dataclass that says what is wanted, `Learned1D(at="every")`, and whose
`build` makes the `torch.nn.Module` that does it.
"""
