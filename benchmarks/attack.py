"""Attack vitrail with damaged files and kills, and write one table of what happened.

    python benchmarks/attack.py --mutations 10000 --kills 1000        # many hours
    python benchmarks/attack.py --mutations 200 --kills 20            # some minutes

`tests/hostile` runs a small, fixed part of this at every change. A mutation damages one file that vitrail wrote (a model, a run,
a checkpoint, an export, an index, a journal, a cache, a study) and runs the commands that read it. A kill is SIGKILL at a random
moment, after which the command is resumed and its result compared with that of a run left alone.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import measure

from tests.hostile.kills import Killing
from tests.hostile.own_files import TARGETS, attack

BATCH = 25  # mutations in one process: a crash loses no more


def attack_files(name: str, count: int, offset: int) -> tuple[Counter[str], list[str]]:
    """Return counts of outcomes and the failures of one target; every batch runs in a process of its own."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for first in range(offset, offset + count, BATCH):
        seeds = range(first, min(first + BATCH, offset + count))
        with tempfile.TemporaryDirectory() as directory:
            root, results = Path(directory) / "work", Path(directory) / "failures"
            root.mkdir()
            child = os.fork()
            if not child:
                results.write_text("\n".join(line.replace("\n", " ") for line in attack(name, seeds, root)))
                os._exit(0)
            _, status, usage = os.wait4(child, 0)
            found = results.read_text().splitlines() if results.is_file() else []
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                found.append(f"seeds {seeds.start} to {seeds.stop - 1}: the process ended with {code}")
            outcomes["cases"] += len(seeds)
            outcomes["failures"] += len(found)
            outcomes["peak_mb"] = max(outcomes["peak_mb"], usage.ru_maxrss // 1024)
            failures += found
    return outcomes, failures


def kill_runs(kind: str, count: int, offset: int) -> tuple[Counter[str], list[str]]:
    """Return counts of kills and finished runs, and the differences."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        killing, seed = Killing(kind, Path(directory)), offset
        while outcomes["kills"] < count:
            kills, found = killing.attack(seed)
            outcomes["kills"] += kills
            outcomes["cases"] += 1
            outcomes["failures"] += len(found)
            failures += found
            seed += 1
    return outcomes, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mutations", type=int, default=1_200, metavar="N", help="damaged files in all (default: 1200)"
    )
    parser.add_argument(
        "--kills", type=int, default=40, metavar="N", help="kills of train and of predict (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=1_000, metavar="N", help="first seed (default: 1000)")
    parser.add_argument("--only", nargs="*", choices=[*TARGETS, "train", "predict"], help="only these")
    options = parser.parse_args()
    chosen = options.only or [*TARGETS, "train", "predict"]
    per_target = max(1, options.mutations // len(TARGETS))
    rows, failures = [], []
    print("| attacked | cases | kills | failures | peak MB | seconds |\n|---|---|---|---|---|---|")
    for name in chosen:
        begin = time.monotonic()
        if name in TARGETS:
            outcomes, found = attack_files(name, per_target, options.seed)
        else:
            outcomes, found = kill_runs(name, options.kills, options.seed)
        row = {"attacked": name, **outcomes, "seconds": round(time.monotonic() - begin)}
        rows.append(row)
        failures += [f"{name}: {line}" for line in found]
        cells = (name, *(row.get(key, "–") for key in ("cases", "kills", "failures", "peak_mb", "seconds")))
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for line in failures:
        print(line[:300])
    measure.save("attack", {"rows": rows, "failures": failures})
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
