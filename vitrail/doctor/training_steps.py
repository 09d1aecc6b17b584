"""Steps of the self-test that train: a run that is killed and resumed, and a run of two processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.load import load
from vitrail.doctor.worker import Context, last_line
from vitrail.training.recipe import Machine
from vitrail.training.train import resume, train

STEPS, KILL_AFTER = 32, 8  # steps of the run, and of its first part
WAIT_SECONDS = 180.0  # for the first checkpoint of the run that is killed
# SGD shows it if gradients were summed instead of averaged, and without ReLU in the stem rounding stays small.
SETTINGS = ("model.size.depth=2", "model.embed=Patches", "optimizer=SGD", "optimizer.lr=0.05", "ema=EMA")
SETTINGS += ("calibrate=none",)
BATCH = 32
RELATIVE, ABSOLUTE = 1e-3, 2e-4  # differences by the order of additions


def resume_killed_run(context: Context) -> tuple[str, dict[str, Any]]:
    """Train on the digits; train again, kill the process, resume, and compare the weights and the log bit for bit."""
    with inside(context.folder):
        context.report("training without a disturbance")
        whole = train_reference()
        context.report("training again, to be killed")
        step = kill_run("killed")
        context.report(f"resuming after step {step}")
        resume("killed")
    killed = context.folder / "killed"
    files = ("model.safetensors", "metrics.jsonl")
    differing = [name for name in files if (killed / name).read_bytes() != (whole / name).read_bytes()]
    if differing:
        raise AssertionError(f"{' and '.join(differing)} of the resumed run differ from those of the undisturbed one")
    detail = f"killed after step {step} of {STEPS}: weights and log equal those of the undisturbed run"
    return detail, {"steps": STEPS, "killed_after": step}


def train_two_processes(context: Context) -> tuple[str, dict[str, Any]]:
    """Train with torchrun on two processes, and compare the weights with those of one process."""
    with inside(context.folder):
        context.report("training on one process")
        whole = train_reference()
        context.report("training on two processes")
        command = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "vitrail", "train", "digits")
        options = ("--out", "pair", *command_options())
        run_module(*command, *options)
        one, two = (load(path).state_dict() for path in (whole, context.folder / "pair"))
    worst = max(float((one[name].double() - two[name].double()).abs().max()) for name in one)
    for name in one:
        if not torch.allclose(one[name], two[name], RELATIVE, ABSOLUTE):
            raise AssertionError(f"{name} of two processes differs from that of one by up to {worst:.2g}")
    return f"weights differ by at most {worst:.1g}, by the order of additions", {"max_difference": worst}


def train_reference() -> Path:
    """Train the undisturbed run, once for all steps; return its directory."""
    path = Path("whole").absolute()
    if not (path / "summary.json").is_file():
        machine = Machine(device="cpu")
        train("digits", out=path, steps=STEPS, batch_size=BATCH, settings=SETTINGS, precision="fp32", machine=machine)
    return path


def command_options() -> list[str]:
    """Return the options of the reference run on the command line."""
    fixed = ["--steps", str(STEPS), "--batch-size", str(BATCH), "--precision", "fp32", "--device", "cpu", "--quiet"]
    return fixed + [word for setting in SETTINGS for word in ("--set", setting)]


def kill_run(name: str) -> int:
    """Start a run as a process, kill it without warning after some steps, and return the step of its last checkpoint."""
    command = [sys.executable, "-m", "vitrail", "train", "digits", "--out", name, "--save-seconds", "0"]
    process = subprocess.Popen([*command, *command_options()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        while find_newest(Path(name)) < KILL_AFTER:
            if process.poll() is not None:
                assert process.stdout is not None
                raise RuntimeError(f"the run ended by itself: {last_line(process.stdout.read())}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no checkpoint of step {KILL_AFTER} within {WAIT_SECONDS:.0f} s")
            time.sleep(0.005)
    finally:
        process.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        process.wait()
    if (Path(name) / "summary.json").exists():
        raise RuntimeError("the run finished before it could be killed")
    return find_newest(Path(name))


def find_newest(run: Path) -> int:
    """Return the step of the newest checkpoint of a run, 0 without one."""
    steps = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def run_module(*command: str) -> None:
    """Run a Python module as a process; raise RuntimeError with its last line if it fails."""
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {done.returncode}: {last_line(done.stdout)}")


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder: recipes and journals then name the same relative paths."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
