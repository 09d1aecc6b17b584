"""Run commands as separate processes, forked from a server process that has already imported everything.

`python -m vitrail train` spends most of a tiny run's time importing. The server does that once; each forked child has its own
directory, environment, output and exit code, as any other process. Run as a program, this file is the server: it reads one
request per line, and writes the process id and then the exit code.
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
    "vitrail.training.train",
    "vitrail.training.recipes",
    "vitrail.evaluation.evaluate",
    "vitrail.analysis.inspect",
    "vitrail.evaluation.transfer",
    "torch.distributed.checkpoint",
    "sklearn.linear_model",
    "sklearn.datasets",
)


def run(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: int = 300
) -> "subprocess.CompletedProcess[str]":
    """Run `vitrail` with these arguments and return the completed process."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "out": str(out),
            "err": str(err),
            "timeout": timeout,
        }
        start_child(request)
        code = wait_for_child()
        return subprocess.CompletedProcess(["vitrail", *arguments], code, out.read_text(), err.read_text())


def start_child(request: Mapping[str, object]) -> int:
    """Let the server fork a child; return its process id. One child runs at a time."""
    requests, answers = start_server()
    requests.write(json.dumps(request) + "\n")
    requests.flush()
    return int(answers.readline())


def wait_for_child() -> int:
    """Return the exit code of the child as subprocess has it: negative for a signal."""
    return int(start_server()[1].readline())


@cache
def start_server() -> tuple[IO[str], IO[str]]:
    """Start the server, one per test process; it is killed at exit."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    atexit.register(server.kill)
    return server.stdin, server.stdout


def serve() -> None:
    """Fork a child for each request on standard input."""
    for name in IMPORTED:
        __import__(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            run_child(request)
        answers.write(f"{child}\n")
        answers.flush()
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


def run_child(request: dict[str, object]) -> None:
    """Run the command in the forked child and exit. SIGALRM ends it after its timeout."""
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
    except BaseException:  # as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
