"""Commands as processes of their own, quickly: forked from one that has imported everything and done nothing else.

`python -m vitrail train` spends most of a tiny run's time importing. The mother process does that once; what its children do
(their directory, environment, output, exit code) is their own, as with any other process. Started as a program, this file is
the mother: it reads a request in each line, and answers with the exit code.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

IMPORTED = (
    "vitrail.training",
    "vitrail.pretraining",
    "vitrail.recipes",
    "vitrail.evaluation.evaluating",
    "vitrail.views.inspecting",
    "vitrail.transfer.compare",
    "torch.distributed.checkpoint",
    "sklearn.linear_model",
    "sklearn.datasets",
)


def run(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: int = 300
) -> "subprocess.CompletedProcess[str]":
    """`vitrail` with these arguments, to its end."""
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "out": str(out),
            "err": str(err),
            "timeout": timeout,
        }
        asked, told = mother()
        asked.write(json.dumps(request) + "\n")
        asked.flush()
        code = int(told.readline())
        return subprocess.CompletedProcess(["vitrail", *arguments], code, out.read_text(), err.read_text())


@cache
def mother() -> tuple[IO[str], IO[str]]:
    """The process that forks, one for each process that tests; it ends when nobody asks any more."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert started.stdin is not None
    assert started.stdout is not None
    atexit.register(started.kill)
    return started.stdin, started.stdout


def serve() -> None:
    for name in IMPORTED:
        __import__(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            be(request)
        answers.write(f"{ended(child)}\n")
        answers.flush()


def ended(child: int) -> int:
    """The exit code, as subprocess has it: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def be(request: dict[str, object]) -> None:
    """What the child does, up to its end. It is killed when its time is over."""
    code = 1
    try:
        os.setsid()
        signal.alarm(int(str(request["timeout"])))
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(str(request[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[call-overload]
        os.chdir(str(request["cwd"]))
        arguments = [str(word) for word in request["arguments"]]  # type: ignore[attr-defined]
        sys.argv = ["vitrail", *arguments]
        from vitrail.cli import main

        code = main()
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1 if stopped.code else 0
    except BaseException:  # as at the end of any program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
