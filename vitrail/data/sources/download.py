"""One file from its publisher: resumed where it broke off, checked, and named only when it is whole."""

import hashlib
import http.client
import io
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

from vitrail.data.sources.parts import Progress

ATTEMPTS = 5  # after something has come; where nothing ever did, two are enough to tell
PAUSE = 1.0  # seconds before the second attempt; doubled for each one after it
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 2**18


def download(url: str, path: Path, md5: str, progress: Progress | None = None) -> None:
    """The file at an address, at this place. What came of it before a break is kept in `.partial`, and continued."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "ab+") as file:
        _lock(file)
        if path.exists():  # another process was quicker
            partial.unlink(missing_ok=True)
            return
        began = _end(file)
        try:
            _fetched(url, file, progress)
        finally:
            if not _end(file):
                partial.unlink(missing_ok=True)
        if began and _md5(file) != md5:  # what was there was of something else: once more, from nothing
            file.truncate(0)
            _fetched(url, file, progress)
        if (found := _md5(file)) != md5:
            partial.unlink(missing_ok=True)
            raise ValueError(f"{url} has the checksum {found}, not {md5}: it was changed or damaged, and is not kept")
        file.flush()
        os.fsync(file.fileno())
        os.replace(partial, path)


def _fetched(url: str, file: io.BufferedRandom, progress: Progress | None) -> None:
    """All of it, in as many attempts as it takes; an attempt that brings something does not count."""
    left, pause, have = 2, PAUSE, _end(file)
    while True:
        try:
            if _attempt(url, file, progress):
                return
            problem: Exception = ConnectionError("the connection broke off")
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise OSError(f"{url} answers {error.code} {error.reason}") from None
            problem = error
        except (OSError, http.client.HTTPException) as error:
            problem = error
        if _end(file) > have:
            left, pause, have = ATTEMPTS, PAUSE, _end(file)
        left -= 1
        if not left:
            reason = getattr(problem, "reason", None) or problem
            raise OSError(f"{url} cannot be read: {reason}") from None
        time.sleep(pause)
        pause *= 2


def _attempt(url: str, file: io.BufferedRandom, progress: Progress | None) -> bool:
    """Whether the file is whole after one more request for what is missing of it."""
    have = _end(file)
    request = urllib.request.Request(url, headers={"User-Agent": "vitrail", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left of it: the checksum tells whether that is so
            return True
        raise
    with answer:
        if answer.status != 206:  # the server gives all of it, whatever was asked for
            file.truncate(0)
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else 0
        while block := answer.read(BLOCK):
            file.write(block)
            have += len(block)
            if progress:
                progress(f"downloading {url.rpartition('/')[2]}", have, total)
        file.flush()
    return not total or have >= total


def _end(file: io.BufferedRandom) -> int:
    return file.seek(0, os.SEEK_END)


def _md5(file: io.BufferedRandom) -> str:
    """The publishers' kind of checksum: against damage, not against malice."""
    file.flush()
    file.seek(0)
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _lock(file: io.BufferedRandom) -> None:
    """Waits for other processes that download the same, on systems that can."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(file.fileno(), fcntl.LOCK_EX)
