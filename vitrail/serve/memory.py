"""Memory that large pictures took goes back to the system."""

import ctypes
import platform

LARGE = 1_000_000  # pixels or bytes: what smaller ones take is wanted again soon


class Memory:
    """Remembers that something large came by, until it was seen to. glibc keeps what is freed in each thread's own heap."""

    def __init__(self) -> None:
        self.owed = False
        self.libc = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None

    def saw(self, pixels: int) -> None:
        """A picture of so many pixels was opened, or a body of so many bytes."""
        self.owed = self.owed or pixels >= LARGE

    def give_back(self) -> None:
        """Hands back what is free, if it may be much."""
        if self.owed and self.libc is not None:
            self.owed = False
            self.libc.malloc_trim(0)
