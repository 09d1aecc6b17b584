"""Runners: processes that claim and run the missing cells of a study. Any number of them may share a directory."""

import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from uuid import uuid4

import torch

from vitrail.studies import cells
from vitrail.studies.cells import CellClaim, CellClaimer, ClaimLost
from vitrail.studies.study import Cell, format_point
from vitrail.studies.sweep import Sweep, SweepState
from vitrail.training.logging import Listener
from vitrail.training.recipe import Machine
from vitrail.training.runs.record import write_json
from vitrail.training.trainer import STOP_SIGNALS, Diverged, Stopped
from vitrail.utils.devices import count_cores
from vitrail.utils.slurm import stop_code

# A cell runs in one process, even under torchrun or srun.
DISTRIBUTED_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


def leave_process_group() -> None:
    """Replace torchrun's process-group variables by those of a single process. LOCAL_RANK stays: it selects the GPU."""
    for name in DISTRIBUTED_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # present, so that those of srun are not adopted again


def worker_environment(number: int, jobs: int) -> dict[str, str]:
    """Return the environment of worker `number` of `jobs`: its share of the cores and, if there are any, a GPU."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, count_cores() // jobs)
    threads = str(min(share, int(limit)) if limit.isdecimal() and int(limit) else share)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = {"LOCAL_RANK": str(number % gpus)} if gpus else {}
    return os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads} | gpu


def run_jobs(command: Sequence[str], jobs: int, on_record: Listener) -> list[int]:
    """Run `jobs` processes of a command to their end and return their exit codes. An interrupt stops them, state saved."""
    records: queue.Queue[dict[str, Any] | None] = queue.Queue()
    workers: list[subprocess.Popen[str]] = []
    asked = [number for number in STOP_SIGNALS if number != signal.SIGINT]  # that raises KeyboardInterrupt
    previous = {number: signal.signal(number, _raise_exit) for number in asked}
    try:
        for number in range(jobs):
            workers.append(_start(command, worker_environment(number, jobs)))
            threading.Thread(target=_listen, args=(workers[-1], records), daemon=True).start()
        left = jobs
        while left:
            record = records.get()
            if record is None:
                left -= 1
            else:
                on_record(record)
        return [worker.wait() for worker in workers]
    except BaseException:
        _stop(workers)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def print_record(record: dict[str, Any]) -> None:
    """Print a record as a JSON line for the parent process. If the parent is gone, terminate this process."""
    try:
        print(json.dumps(record, default=str), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        os.kill(os.getpid(), signal.SIGTERM)


def _start(command: Sequence[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    """Start a worker in its own session, so that Ctrl-C reaches only the parent, which stops every worker once."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def _listen(worker: "subprocess.Popen[str]", records: "queue.Queue[dict[str, Any] | None]") -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        records.put(record if isinstance(record, dict) else {"kind": "note", "text": line.rstrip()})
    worker.wait()
    records.put(None)


def _stop(workers: Sequence["subprocess.Popen[str]"]) -> None:
    """Ask all workers to stop after their current step; kill them on a second Ctrl-C."""
    for worker in workers:
        worker.terminate()
    try:
        for worker in workers:
            worker.wait()
    except BaseException:
        for worker in workers:
            worker.kill()
        raise


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(stop_code(number))


POLL_SECONDS = 2.0  # between looks for new cells while other runners work
PROGRESS_INTERVAL_SECONDS = 1.0  # between progress records


@dataclass
class Runner:
    """One process that runs a study's cells. `on_record` receives records of cells, of the state and of the runs."""

    sweep: Sweep
    machine: Machine = Machine()  # noqa: RUF009 (a value)
    on_record: Listener = lambda record: None
    claimer: CellClaimer = field(default_factory=CellClaimer)
    poll_seconds: float = POLL_SECONDS

    def run(self) -> SweepState:
        """Run until no cell is missing. Earlier failures are retried once; cells that fail meanwhile are skipped."""
        gc.freeze()  # objects that exist now are not scanned after every cell
        try:
            return self.run_cells()
        finally:
            gc.unfreeze()

    def run_cells(self) -> SweepState:
        """Run cells one after another and return the final state."""
        before = {failed.id for failed in self.sweep.read_state().failed.values()}
        while True:
            state = self.sweep.read_state()
            self.on_record(state_record(state))
            given_up = {name for name, failed in state.failed.items() if failed.id not in before}
            left = [name for name in state.missing if name not in given_up]
            if not left:
                return state
            if not any(self.try_cell(name, state.cells[name]) for name in left):
                time.sleep(self.poll_seconds)

    def try_cell(self, name: str, cell: Cell) -> bool:
        """Run a cell if it can be claimed; return True if it was claimed."""
        claim = self.claimer.claim(self.sweep.cell_directory(name))
        if claim is None:
            return False
        try:
            if self.sweep.read_result(name, cell) is None:  # another runner may have finished it
                self.run_cell(name, cell, claim)
        finally:
            claim.release()
            free_memory()
        return True

    def run_cell(self, name: str, cell: Cell, claim: CellClaim) -> None:
        """Run a claimed cell to its result, or record why it failed."""
        about = {"cell": name, "label": f"{cell.phase}: {format_point(cell.at)}"}
        began = last_progress = time.monotonic()

        def emit(record: dict[str, Any]) -> None:
            claim.check()
            self.on_record(record | about)

        def progress(doing: str, done: int, total: int) -> None:
            nonlocal last_progress
            if time.monotonic() - last_progress > PROGRESS_INTERVAL_SECONDS:
                last_progress = time.monotonic()
                emit({"kind": "progress", "doing": doing, "done": done, "total": total})

        emit({"kind": "cell", "what": "begins"})
        home = self.sweep.cell_directory(name)
        try:
            try:
                directory = cells.adopt_run(home, claim)
                try:
                    summary = cells.run_training(cell.recipe, directory, self.machine, (emit,), progress)
                    numbers = cells.collect_numbers(self.sweep.study, cell, directory, summary)
                    seconds = max(time.monotonic() - began, summary["seconds"])
                except Diverged as error:
                    is_trial = cell.phase == "tune" or (cell.phase == "base" and cell.at["seed"] == 0)
                    if not is_trial or "rate" not in cell.at:
                        raise
                    # A tuning run whose learning rate is too high counts with accuracy 0.
                    numbers = {"validation": 0.0, "diverged": str(error)}
                    seconds = time.monotonic() - began
                cells.finalise_run(home, directory, claim)
                self.sweep.write_result(name, cell, numbers, seconds)
                scores = {key: numbers[key] for key in ("validation", "test") if key in numbers}
                outcome = {"what": "done", "seconds": seconds, **scores}
            except (Stopped, ClaimLost):
                raise
            except Exception as error:  # recorded; the other cells still run
                claim.check_now()
                failure = {"line": first_line(error), "traceback": "".join(traceback.format_exception(error))}
                write_json(home / "failed.json", {"id": uuid4().hex, **failure})
                outcome = {"what": "failed", "line": failure["line"]}
        except ClaimLost:
            outcome = {"what": "lost"}
        self.on_record({"kind": "cell"} | outcome | about)


def state_record(state: SweepState) -> dict[str, Any]:
    """Return the state of a study as a record for listeners."""
    return {
        "kind": "state",
        "known": len(state.cells),
        "done": len(state.results),
        "failed": len(state.failed),
        "seconds_left": state.seconds_left(),
    }


def first_line(error: Exception) -> str:
    """Return the first line of an error message, with the error's type unless it is a message for users."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if isinstance(error, (ValueError, OSError)) and line else f"{type(error).__name__}: {line}"


def free_memory() -> None:
    """Collect reference cycles of a finished run and release cached GPU memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
