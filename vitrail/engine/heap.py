"""Memory that a step gives back is kept for the next one."""

import ctypes
import platform

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's names for what mallopt sets
KEPT = 2**30  # bytes


def keep_memory() -> None:
    """Tells glibc to keep what is freed. Elsewhere nothing is done: other allocators keep it, and a GPU's is PyTorch's own.

    A training step on a CPU frees its activations, megabytes each, and takes as many again. glibc would hand them back to the
    system every time and have every page cleared anew: a tenth to a quarter of a small model's step.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, KEPT)
        libc.mallopt(TRIM_THRESHOLD, KEPT)
