"""The step of the self-test that imports every installed package of the extras."""

import subprocess
import sys
from typing import Any

from vitrail.doctor.packages import describe_packages, module_name
from vitrail.doctor.probe import describe_exit
from vitrail.doctor.summary import count_words
from vitrail.doctor.worker import Context

# Each name is printed before its import, so that a crash names it.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print("start", name, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print("error", name, f"{type(error).__name__}: {(lines or [''])[0]}", flush=True)
"""


def import_packages(context: Context) -> tuple[str, dict[str, Any]]:
    """Import every installed package in one process; raise ImportError with those that fail."""
    names = [
        module_name(package["name"])
        for group in describe_packages()
        for package in group["packages"]
        if package["version"] is not None
    ]
    waiting, failures = list(dict.fromkeys(names)), dict[str, str]()
    count = len(waiting)
    while waiting:
        context.report(f"importing {len(waiting)} packages")
        done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *waiting], capture_output=True, text=True)
        started = []
        for line in done.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "start":
                started.append(rest)
            elif kind == "error":
                name, _, message = rest.partition(" ")
                failures[name] = message
        if not done.returncode or not started:
            break
        failures[started[-1]] = describe_exit(done.returncode)
        waiting = waiting[waiting.index(started[-1]) + 1 :]
    if failures:
        raise ImportError("; ".join(f"{name}: {message}" for name, message in failures.items()))
    return f"{count_words(count, 'package')} imported", {"packages": count}
