"""Suppression of what a library of C prints to standard error."""

import os
import threading

import pytest

from vitrail.utils.stderr import StderrFilter


def test_lines_of_the_library_are_dropped_and_others_kept(capfd: pytest.CaptureFixture[str]) -> None:
    quiet = StderrFilter("[src/lib", "Note: ")
    with quiet():
        os.write(2, b"[src/lib/x.c] error\n\nNote: this\nanother message\n")
        with quiet():
            os.write(2, b"Note: nested\n")
    os.write(2, b"Note: after\n")
    assert capfd.readouterr().err == "another message\nNote: after\n"


def test_blocks_of_threads_overlap(capfd: pytest.CaptureFixture[str]) -> None:
    quiet, meet = StderrFilter("drop"), threading.Barrier(4)

    def work(number: int) -> None:
        for _ in range(20):
            with quiet():
                meet.wait()
                os.write(2, f"drop {number}\nkeep {number}\n".encode())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"keep {number}" for number in range(4) for _ in range(20))
