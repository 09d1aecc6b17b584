"""`python -m vitrail`, and `torchrun -m vitrail` on many processes."""

import atexit
import os
import sys
from contextlib import suppress

from vitrail.cli import main


def leave(code: int) -> None:
    """Ends one of several processes with everything written, and without taking the interpreter apart.

    A thread of a process group that lets go of a tensor while Python is being taken apart is ended in the middle of C++ code,
    which aborts the process; torchrun then stops the others, which may still be writing the model.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # nobody listens any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    done = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        leave(done)
    raise SystemExit(done)
