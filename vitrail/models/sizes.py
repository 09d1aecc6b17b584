"""The sizes of the family as a table: "B/16" is parsed, never a function of its own."""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Table 1 of the paper: layers, hidden size D, MLP size, heads. A head has D/heads values unless `head` says more."""

    depth: int
    width: int
    mlp: int
    heads: int
    head: int | None = None


SIZES = {
    "Ti": Size(12, 192, 768, 3),  # DeiT, AugReg
    "S": Size(12, 384, 1536, 6),  # DeiT, AugReg
    "B": Size(12, 768, 3072, 12),  # the paper's table 1
    "L": Size(24, 1024, 4096, 16),
    "H": Size(32, 1280, 5120, 16),
    "g": Size(40, 1408, 6144, 16),  # Scaling Vision Transformers
    "G": Size(48, 1664, 8192, 16),
}

RESNETS = {  # blocks in each stage
    14: (1, 1, 1, 1),
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def closest(name: str, known: list[str]) -> str:
    """Known names for an error message, the likeliest first."""
    likely = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    likely = likely or [k for k in known if k.lower() == name.lower()]
    return (f"did you mean {likely[0]!r}? " if likely else "") + f"Known: {', '.join(known)}"


def named_size(name: str) -> Size:
    """A row of the table."""
    if name not in SIZES:
        raise ValueError(f"unknown size {name!r}: {closest(name, list(SIZES))}")
    return SIZES[name]
