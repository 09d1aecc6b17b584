"""Entry point of `python -m vitrail` and of `torchrun -m vitrail`."""

import atexit
import os
import sys
from contextlib import suppress

from vitrail.cli import main


def exit_process(code: int) -> None:
    """Run the exit handlers, flush the output and end the process without the interpreter's shutdown.

    A process-group thread that frees a tensor during Python's shutdown aborts the process inside C++; torchrun then stops
    the other processes, which may still be writing the model.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # the reader has closed the pipe
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        exit_process(exit_code)
    raise SystemExit(exit_code)
