"""What a model looks at and what it has learnt, seen from outside, with fused attention on."""
