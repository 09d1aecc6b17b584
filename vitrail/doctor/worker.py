"""The process that runs the steps of the self-test: `python -m vitrail.doctor.worker MODULE…`.

It first imports the modules of the steps, before the time of a step counts. Then it reads one request per line and writes lines
of progress and one of the result. It ends with the process that started it.
"""

import importlib
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from vitrail.doctor.probe import first_line


@dataclass(frozen=True)
class Context:
    """The arguments of a step."""

    folder: Path  # for its files; all steps of a self-test share it
    device: str
    seconds: float  # of one measurement
    answers: IO[str] | None = None

    def report(self, text: str) -> None:
        """Say what the step does now."""
        if self.answers is not None:
            self.answers.write(json.dumps({"progress": text}) + "\n")
            self.answers.flush()


def run_function(name: str, context: Context) -> dict[str, Any]:
    """Return the result of a step: `detail` and `values`, or one line of an `error`."""
    module, _, function = name.partition(":")
    try:
        detail, values = getattr(importlib.import_module(module), function)(context)
    except Exception as error:  # whatever is wrong with the machine, the other steps run
        return {"error": first_line(error)}
    return {"detail": detail, "values": values}


def last_line(output: bytes) -> str:
    """Return the last line of an output that is an error, else the last one."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line or line.startswith("vitrail ")]
    return (errors or lines or ["no output"])[-1]


def read_requests(source: IO[str], requests: "SimpleQueue[str]") -> None:
    """Read requests until the process that started this one ends; then end this one and what it started."""
    for line in source:
        requests.put(line)
    if os.name == "posix":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run the steps that are asked for."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    # Not sys.stdin: a forked worker closes that, and would wait for ever for the lock of the thread that reads it.
    source = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    requests: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=read_requests, args=(source, requests), daemon=True).start()
    with suppress(Exception):  # the steps say what does not import
        for name in sys.argv[1:]:
            importlib.import_module(name)
    answers.write('{"ready": true}\n')
    answers.flush()
    while True:
        request = json.loads(requests.get())
        context = Context(Path(request["folder"]), request["device"], request["seconds"], answers)
        result = run_function(request["function"], context)
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
