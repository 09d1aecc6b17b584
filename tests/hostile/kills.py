"""SIGKILL at random moments, then the same command again until it ends; the result must be that of a run left alone."""

import hashlib
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.forked import start_child, wait_for_child

TRAIN = (
    *(
        "train",
        "digits",
        "--out",
        "run",
        "--steps",
        "12",
        "--batch-size",
        "32",
        "--save-seconds",
        "0",
        "--workers",
        "0",
    ),
    *(
        "--set",
        "model.size.depth=1",
        "--set",
        "model.size.heads=2",
        "--set",
        "model.size.width=16",
        "--set",
        "model.size.mlp=32",
    ),
    *("--set", "validate_every=0.1", "--device", "cpu"),
)
FIXTURES = Path(__file__).parent.parent / "compatibility" / "fixtures"
PREDICT = ("predict", str(FIXTURES / "finished/vit/model.safetensors"), str(FIXTURES / "images"), "--out", "out.csv")
MAX_KILLS = 4


def start(arguments: tuple[str, ...], cwd: Path) -> int:
    """Fork a process that runs the command; return its id. Everything is imported before, so that it starts at once."""
    return start_child(
        {
            "arguments": arguments,
            "cwd": str(cwd),
            "env": {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache")},
            "out": str(cwd / "stdout"),
            "err": str(cwd / "stderr"),
            "timeout": 300,
        }
    )


def run_to_end(arguments: tuple[str, ...], cwd: Path) -> float:
    """Run the command undisturbed; return its seconds."""
    cwd.mkdir(parents=True)
    begin = time.monotonic()
    start(arguments, cwd)
    code = wait_for_child()
    assert code == 0, (cwd / "stderr").read_text()
    return time.monotonic() - begin


def kill_until_done(
    first: tuple[str, ...], again: tuple[str, ...], cwd: Path, seconds: float, rng: random.Random
) -> int:
    """Start the command, kill it at random moments within its `seconds`, and resume it; return the number of kills."""
    cwd.mkdir(parents=True)
    kills, arguments = 0, first
    while True:
        child = start(arguments, cwd)
        if kills < MAX_KILLS:
            time.sleep(rng.uniform(0, seconds))
            with suppress(ProcessLookupError):  # it has ended
                os.kill(child, signal.SIGKILL)
        code = wait_for_child()
        if code == -signal.SIGKILL:
            kills += 1
            if (cwd / "out.csv").is_file():  # killed after its last step
                return kills
            arguments = again if (cwd / "run").is_dir() or list(cwd.glob("out.csv.*")) else first
            continue
        assert code == 0, (cwd / "stderr").read_text()
        return kills


def hash_result(cwd: Path) -> dict[str, str]:
    """Return the checksums of what a run or a prediction must end with."""
    names = ("run/model.safetensors", "run/metrics.jsonl", "out.csv")
    return {name: hashlib.sha256((cwd / name).read_bytes()).hexdigest() for name in names if (cwd / name).is_file()}


def list_leftovers(cwd: Path) -> list[str]:
    """Return what unfinished writes left in the run; what is left beside it goes at the next start after a while."""
    found = [*(cwd / "run").rglob("*.partial*"), *cwd.glob("out.csv.*")]
    return sorted(str(path.relative_to(cwd)) for path in found)


class Killing:
    """Kills of one command, compared with a run of it that was left alone."""

    def __init__(self, kind: str, root: Path) -> None:
        self.root = root
        self.first = TRAIN if kind == "train" else PREDICT
        self.again = ("train", "--resume", "run") if kind == "train" else (*PREDICT, "--resume")
        run_to_end(self.first, root / "warm-up")
        self.seconds = run_to_end(self.first, root / "alone")
        self.expected = hash_result(root / "alone")

    def attack(self, seed: int) -> tuple[int, list[str]]:
        """Return the number of kills and what differs afterwards."""
        cwd = self.root / str(seed)
        kills = kill_until_done(self.first, self.again, cwd, self.seconds, random.Random(seed))
        found = hash_result(cwd)
        problems = [f"seed {seed}: {name} differs" for name in self.expected if found.get(name) != self.expected[name]]
        return kills, problems + [f"seed {seed}: {name} is left" for name in list_leftovers(cwd)]
