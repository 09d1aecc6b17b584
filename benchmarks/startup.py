"""Startup time of commands and imports.

    python benchmarks/startup.py

Whole processes, interleaved: median and worst of the rounds, beside an empty Python.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import measure

VITRAIL = str(Path(sys.executable).parent / "vitrail")
COMMANDS = {
    "python, nothing else": [sys.executable, "-c", "pass"],
    "vitrail --help": [VITRAIL, "--help"],
    "import vitrail": [sys.executable, "-c", "import vitrail"],
    "import torch": [sys.executable, "-c", "import torch"],
    "vitrail describe G/14": [VITRAIL, "describe", "G/14"],
}
TARGETS = {"vitrail --help": 0.25, "vitrail describe G/14": 3.0}


def process(command: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    seconds = measure.interleave({name: process(command) for name, command in COMMANDS.items()}, rounds=9)
    rows = []
    for name, times in seconds.items():
        target = TARGETS.get(name)
        rows.append({"work": name, "median": measure.median(times), "worst": max(times), "target": target})
        note = f"   target {target} s" if target else ""
        print(f"{name:<24}{measure.median(times):6.3f} s   worst {max(times):6.3f} s{note}")
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, vitrail; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    print(f"import vitrail imports torch: {imported.stdout.strip()}")
    print(f"written to {measure.save('startup', rows)}")


if __name__ == "__main__":
    main()
