"""Logits of a known accuracy, for tests."""

import numpy as np


def single(n=400, classes=7, seed=0, skill=2.0):
    generator = np.random.default_rng(seed)
    targets = generator.choice(classes, size=n, p=generator.dirichlet(np.full(classes, 3.0)))
    logits = generator.normal(size=(n, classes)).astype(np.float32)
    logits[np.arange(n), targets] += skill
    return logits, targets


def several(n=300, classes=9, seed=0, skill=1.5):
    generator = np.random.default_rng(seed)
    targets = (generator.random((n, classes)) < generator.uniform(0.05, 0.5, classes)).astype(np.uint8)
    logits = (generator.normal(size=(n, classes)) + skill * (2.0 * targets - 1)).astype(np.float32)
    return np.round(logits, 1), targets  # rounded: equals must be treated as scikit-learn does
