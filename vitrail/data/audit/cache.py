"""What was seen of pictures before, by path, size and time of change: a second look costs a look at the clock.

One SQLite file for each root, in the user's cache directory. It is only ever a saving: where it cannot be read it is made
again, and where it cannot be written nothing is said.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, fields, replace
from pathlib import Path

from vitrail.data.audit.look import Look

Stamp = tuple[int, int]  # size and time
COLUMNS = [field.name for field in fields(Look)]
# Another version of Look, or of what fills it, is another table: old ones are not misread.
TABLE = "looks_1_" + hashlib.blake2b(" ".join(COLUMNS).encode(), digest_size=4).hexdigest()
EVERY = 2.0  # seconds between commits: as much is lost at most by a kill
ASK = 500  # names in one question


def directory() -> Path:
    """Where the caches of this user lie."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(told) if os.path.isabs(told) else Path.home() / ".cache") / "vitrail"


class Cache:
    """Looks by name and stamp. Closing keeps what was put so far."""

    def __init__(self, root: str) -> None:
        self.connection: sqlite3.Connection | None = None
        name = hashlib.blake2b(os.fsencode(os.path.abspath(root)), digest_size=10).hexdigest()
        with suppress(OSError, RuntimeError):  # no home, no right to write: then there is no cache
            path = directory() / f"check-{name}.sqlite"
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = _opened(path)
        self.last = time.monotonic()

    def get(self, names: Sequence[str], stamps: Sequence[Stamp | None]) -> list[Look | None]:
        """What is known of each."""
        found: list[Look | None] = [None] * len(names)
        if self.connection is None:
            return found
        rows: dict[bytes, tuple] = {}
        keys = [_key(name) for name in names]
        try:
            for start in range(0, len(keys), ASK):
                part = keys[start : start + ASK]
                question = f"SELECT * FROM {TABLE} WHERE path IN ({','.join('?' * len(part))})"
                rows |= {row[0]: row for row in self.connection.execute(question, part)}
        except sqlite3.Error:
            self._give_up()
            return found
        for place, (key, stamp) in enumerate(zip(keys, stamps, strict=True)):
            row = rows.get(key)
            if row is not None and stamp is not None and row[1:3] == stamp:
                look = Look(*row[3:])
                found[place] = replace(look, turned=bool(look.turned), animated=bool(look.animated))
        return found

    def put(self, names: Sequence[str], stamps: Sequence[Stamp | None], looks: Sequence[Look]) -> None:
        """Remembers; what has no stamp cannot be known again."""
        if self.connection is None:
            return
        rows = [
            (_key(name), *stamp, *astuple(look))
            for name, stamp, look in zip(names, stamps, looks, strict=True)
            if stamp is not None
        ]
        try:
            marks = ",".join("?" * (3 + len(COLUMNS)))
            self.connection.executemany(f"INSERT OR REPLACE INTO {TABLE} VALUES ({marks})", rows)
            if time.monotonic() - self.last > EVERY:
                self.connection.commit()
                self.last = time.monotonic()
        except sqlite3.Error:  # a full disk, somebody else writing for long
            self._give_up()

    def close(self) -> None:
        if self.connection is not None:
            with suppress(sqlite3.Error):
                self.connection.commit()
            self._give_up()

    def _give_up(self) -> None:
        if self.connection is not None:
            with suppress(sqlite3.Error):
                self.connection.close()
            self.connection = None


def _opened(path: Path) -> sqlite3.Connection | None:
    """The table, made where it is not; a file that is none is replaced."""
    for attempt in range(2):
        connection = None
        try:
            connection = sqlite3.connect(path, timeout=1.0)
            connection.execute("PRAGMA synchronous = OFF")  # after a power cut it is made again
            connection.execute("PRAGMA quick_check(1)") if path.stat().st_size < 2**24 else None
            kinds = ", ".join(COLUMNS)
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {TABLE} (path BLOB PRIMARY KEY, size, time, {kinds}) WITHOUT ROWID"
            )
            return connection
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.OperationalError) or attempt:  # locked, or no right: not broken
                return None
            with suppress(OSError):
                path.unlink()
    return None


def _key(name: str) -> bytes:
    return os.fsencode(name)
