"""Settings of remote files, from the environment, so that worker processes have the same ones."""

import os
import re
from dataclasses import dataclass

from vitrail.data.remote.urls import RemoteError

CACHE_SIZE, TIMEOUT, ATTEMPTS = "VITRAIL_CACHE_SIZE", "VITRAIL_REMOTE_TIMEOUT", "VITRAIL_REMOTE_ATTEMPTS"
DEFAULT_CACHE_BYTES = 20 * 10**9
MIN_CACHE_BYTES = 16 * 10**6
DEFAULT_TIMEOUT = 30.0  # seconds without data
DEFAULT_ATTEMPTS = 6  # without progress
FIRST_ATTEMPTS = 3  # of a server that has not answered yet: its address may be wrong
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 8.0  # before the second attempt, doubled for each one after it, ± 50 %
UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Return a size such as 20GB or 500MB in bytes; 0 keeps nothing."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = UNITS.get(match[2] if match else "?")
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: use 20GB, 500MB, or 0 for no cache")
    size = int(float(match[1]) * unit)
    if 0 < size < MIN_CACHE_BYTES:
        raise ValueError(f"{text!r} is too small: a cache needs {MIN_CACHE_BYTES // 10**6}MB or more, or 0 for none")
    return size


@dataclass(frozen=True)
class RemoteSettings:
    """The size of the cache in bytes, the time-out of a stalled read in seconds, and the number of attempts."""

    cache_bytes: int
    timeout: float
    attempts: int


def read_settings() -> RemoteSettings:
    """Return the settings of the environment."""
    size = os.environ.get(CACHE_SIZE)
    try:
        cache = DEFAULT_CACHE_BYTES if not size else parse_bytes(size)
    except ValueError as error:
        raise RemoteError(f"{CACHE_SIZE}: {error}") from None
    timeout = _read_number(TIMEOUT, DEFAULT_TIMEOUT)
    return RemoteSettings(cache, timeout, int(_read_number(ATTEMPTS, DEFAULT_ATTEMPTS)))


def _read_number(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not value > 0:
        raise RemoteError(f"{name} must be a number > 0, got {text!r}")
    return value
