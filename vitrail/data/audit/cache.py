"""Cache of image inspections by path, size and modification time.

One SQLite file for each dataset root, in the user's cache directory. A damaged cache is replaced; if it cannot be written,
the audit runs without a cache.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, fields, replace
from pathlib import Path

from vitrail.data.audit.image import ImageInspection
from vitrail.utils.files import cache_directory

FileStamp = tuple[int, int]  # size and time
COLUMNS = [field.name for field in fields(ImageInspection)]
# The name has a hash of the fields: a changed ImageInspection uses a new table.
TABLE = "looks_1_" + hashlib.blake2b(" ".join(COLUMNS).encode(), digest_size=4).hexdigest()
COMMIT_INTERVAL_SECONDS = 2.0  # at most this much work is lost when the process is killed
MAX_NAMES_PER_QUERY = 500


class InspectionCache:
    """Inspections by name and stamp. Closing saves them."""

    def __init__(self, root: str) -> None:
        self.connection: sqlite3.Connection | None = None
        name = hashlib.blake2b(os.fsencode(os.path.abspath(root)), digest_size=10).hexdigest()
        with suppress(OSError, RuntimeError):  # no home directory or no permission: no cache
            path = cache_directory() / f"check-{name}.sqlite"
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = _open_database(path)
        self.last_commit = time.monotonic()

    def get(self, names: Sequence[str], stamps: Sequence[FileStamp | None]) -> list[ImageInspection | None]:
        """Return the inspection of each image, or None."""
        cached: list[ImageInspection | None] = [None] * len(names)
        if self.connection is None:
            return cached
        rows: dict[bytes, tuple] = {}
        keys = [_encode_name(name) for name in names]
        try:
            for start in range(0, len(keys), MAX_NAMES_PER_QUERY):
                part = keys[start : start + MAX_NAMES_PER_QUERY]
                query = f"SELECT * FROM {TABLE} WHERE path IN ({','.join('?' * len(part))})"
                rows |= {row[0]: row for row in self.connection.execute(query, part)}
        except sqlite3.Error:
            self._disable()
            return cached
        for i, (key, stamp) in enumerate(zip(keys, stamps, strict=True)):
            row = rows.get(key)
            if row is not None and stamp is not None and row[1:3] == stamp:
                inspection = ImageInspection(*row[3:])
                cached[i] = replace(inspection, turned=bool(inspection.turned), animated=bool(inspection.animated))
        return cached

    def put(
        self, names: Sequence[str], stamps: Sequence[FileStamp | None], inspections: Sequence[ImageInspection]
    ) -> None:
        """Store the inspections of images that have a stamp."""
        if self.connection is None:
            return
        rows = [
            (_encode_name(name), *stamp, *astuple(look))
            for name, stamp, look in zip(names, stamps, inspections, strict=True)
            if stamp is not None
        ]
        try:
            marks = ",".join("?" * (3 + len(COLUMNS)))
            self.connection.executemany(f"INSERT OR REPLACE INTO {TABLE} VALUES ({marks})", rows)
            if time.monotonic() - self.last_commit > COMMIT_INTERVAL_SECONDS:
                self.connection.commit()
                self.last_commit = time.monotonic()
        except sqlite3.Error:  # disk full or locked for too long
            self._disable()

    def close(self) -> None:
        if self.connection is not None:
            with suppress(sqlite3.Error):
                self.connection.commit()
            self._disable()

    def _disable(self) -> None:
        if self.connection is not None:
            with suppress(sqlite3.Error):
                self.connection.close()
            self.connection = None


def _open_database(path: Path) -> sqlite3.Connection | None:
    """Open the database and create the table; replace a damaged file."""
    for attempt in range(2):
        connection = None
        try:
            connection = sqlite3.connect(path, timeout=1.0)
            connection.execute("PRAGMA synchronous = OFF")  # a corrupt file is replaced
            connection.execute("PRAGMA quick_check(1)") if path.stat().st_size < 2**24 else None
            kinds = ", ".join(COLUMNS)
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {TABLE} (path BLOB PRIMARY KEY, size, time, {kinds}) WITHOUT ROWID"
            )
            return connection
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.OperationalError) or attempt:  # locked or no permission: not damaged
                return None
            with suppress(OSError):
                path.unlink()
    return None


def _encode_name(name: str) -> bytes:
    return os.fsencode(name)
