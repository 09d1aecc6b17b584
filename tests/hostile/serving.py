"""A service in a process of its own, attacked over raw sockets."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 2**20


@dataclass(frozen=True)
class Process:
    """A running service."""

    process: "subprocess.Popen[str]"
    port: int
    log: Path

    def resident(self) -> int:
        """Return its resident memory in bytes, without that of its decoding processes."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def start_service(folder: Path, *arguments: str, port: int = 0, wait: bool = True) -> Iterator[Process]:
    """Run `vitrail serve` for the block; with `wait`, until its models are open."""
    command = [sys.executable, "-m", "vitrail", "serve", *arguments, "--runtime", "torch", "--port", str(port)]
    log = folder / "log"
    with log.open("w") as errors:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    try:
        assert process.stdout is not None
        for line in process.stdout if wait else ():
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                port = int(found[1])
                break
        else:
            assert not wait, log.read_text()
        yield Process(process, port, log)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def flood(connection: socket.socket, piece: bytes, limit: int, seconds: float = 20.0) -> int:
    """Send a piece again and again, until the limit or until the service ends the connection; return the bytes sent."""
    sent, end = 0, time.monotonic() + seconds
    try:
        while sent < limit and time.monotonic() < end:
            connection.sendall(piece)
            sent += len(piece)
    except (ConnectionError, TimeoutError):
        pass
    return sent


def read_status(connection: socket.socket) -> int | None:
    """Return the status of the next response, None if there is none."""
    try:
        said = connection.recv(65536)
    except (ConnectionError, TimeoutError):
        return None
    return int(said.split(b" ", 2)[1]) if said.startswith(b"HTTP/1.1 ") else None


def is_ended(connection: socket.socket, seconds: float) -> bool:
    """Return True if the service ends the connection within some seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True
