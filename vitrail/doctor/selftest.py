"""The self-test: its steps, and the process that runs them one after another, each with a time limit.

This side of the pipe does not import PyTorch. The steps run in a worker process, which is replaced after a crash or a time
limit, so that one step that fails does not stop the others.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.doctor.diagnosis import StepResult
from vitrail.doctor.probe import describe_exit

DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
START_SECONDS = 300.0  # time limit of the worker's imports, from a network disk for example
Report = Callable[[int, int, str, str], None]  # number of the step, their count, its name, what it does


@dataclass(frozen=True)
class Step:
    """A step of the self-test. `function` is a module and a function, which is called with a `Context`."""

    title: str
    function: str
    seconds: float = 120.0  # time limit, several times what a slow machine needs
    needs_gpu: bool = False
    in_group: bool = False  # under torchrun and srun it runs on all of their processes


STEPS = {
    "resume": Step(
        "a killed run resumes to the same weights, bit for bit",
        "vitrail.doctor.training_steps:resume_killed_run",
        300.0,
    ),
    "ddp": Step(
        "two processes of torchrun train the weights of one", "vitrail.doctor.training_steps:train_two_processes", 300.0
    ),
    "loader": Step(
        "images per second from JPEG files, by worker processes", "vitrail.doctor.speed_steps:measure_loader"
    ),
    "matmul": Step("speed of matrix products", "vitrail.doctor.speed_steps:measure_products"),
    "vit": Step("ViT-S/16: prediction and training steps", "vitrail.doctor.speed_steps:measure_model", 300.0),
    "collectives": Step(
        "bandwidth between processes (all_reduce)",
        "vitrail.doctor.bandwidth_steps:measure_collectives",
        120.0,
        in_group=True,
    ),
    "copies": Step(
        "bandwidth between host and GPU", "vitrail.doctor.bandwidth_steps:measure_copies", 60.0, needs_gpu=True
    ),
    "imports": Step("every installed package imports", "vitrail.doctor.package_steps:import_packages", 300.0),
}


class StartError(RuntimeError):
    """A worker process that cannot start: no step can run."""


class Worker:
    """The process that runs steps. It stands in a session of its own: Ctrl-C reaches this process alone."""

    def __init__(self, folder: Path, environment: Mapping[str, str], modules: Iterable[str]) -> None:
        self.folder = folder
        self.errors = open(folder / "errors.txt", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vitrail.doctor.worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=dict(environment),
            start_new_session=True,
        )
        self.is_ready, self.is_alive = False, True
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Put what the process writes into the queue; None at its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def run(self, step: Step, request: Mapping[str, Any], on_progress: Callable[[str], None]) -> dict[str, Any]:
        """Return `detail` and `values` of a step, or the `error` it ended with; raise TimeoutError after its time limit."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"function": step.function, **request}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:  # it has ended
            return {"error": self.end()}
        return self.await_answer(request["limit"], on_progress)

    def await_start(self, on_progress: Callable[[str], None]) -> None:
        """Wait until the process has imported what the steps use; raise StartError if it does not get there."""
        if self.is_ready:
            return
        on_progress("starting PyTorch")
        try:
            answer = self.await_answer(START_SECONDS, on_progress)
        except TimeoutError:
            raise StartError(f"the process of the self-test did not start within {START_SECONDS:g} s") from None
        if "error" in answer:
            raise StartError(answer["error"])
        self.is_ready = True

    def await_answer(self, seconds: float, on_progress: Callable[[str], None]) -> dict[str, Any]:
        """Return the next answer that is not progress; raise TimeoutError after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"did not end within {seconds:g} s") from None
            if answer is None:
                return {"error": self.end()}
            if "progress" not in answer:
                return answer
            on_progress(answer["progress"])

    def end(self) -> str:
        """End the process, if it has not, and those that it started; return how it ended, with the last line that it wrote."""
        if self.is_alive:
            self.is_alive = False
            if os.name == "posix":
                with suppress(ProcessLookupError):  # its number is not free before the wait
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        how = f"the process {describe_exit(self.process.wait()) or 'ended'}"
        lines = (self.folder / "errors.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        self.errors.close()
        return f"{how}: {lines[-1]}" if lines else how


class SelfTest:
    """The steps that were asked for, and their results, which are complete up to the moment of an interrupt."""

    def __init__(
        self,
        names: Iterable[str] = tuple(STEPS),
        *,
        device: str = "cpu",
        group: Mapping[str, str] | None = None,
        limit: float | None = None,
        seconds: float = 1.0,
        steps: Mapping[str, Step] | None = None,
    ) -> None:
        """Prepare the steps of these names.

        `device` is where models are measured, `group` the variables of the processes that torchrun or srun started, `limit` the
        time limit of every step [its own], `seconds` the time of one measurement. `steps` replaces the table of steps.
        """
        table = STEPS if steps is None else steps
        on_gpu = device.startswith("cuda")
        self.steps = {name: table[name] for name in names if on_gpu or not table[name].needs_gpu}
        if group:  # first what the other processes wait for
            self.steps = dict(sorted(self.steps.items(), key=lambda item: not item[1].in_group))
        self.device, self.group, self.limit, self.seconds = device, group, limit, seconds
        self.results: list[StepResult] = []

    def run(self, report: Report | None = None, environment: Mapping[str, str] | None = None) -> list[StepResult]:
        """Run all steps. After KeyboardInterrupt, `results` lists the interrupted step as stopped and the others as skipped."""
        with (
            tempfile.TemporaryDirectory(prefix="vitrail-doctor-", ignore_cleanup_errors=True) as folder,
            self.open_workers(Path(folder), os.environ if environment is None else environment) as get_worker,
        ):
            for number, (name, step) in enumerate(self.steps.items(), start=1):

                def on_progress(text: str, number: int = number, name: str = name) -> None:
                    if report is not None:
                        report(number, len(self.steps), name, text)

                start = time.monotonic()
                try:
                    worker = get_worker(bool(self.group) and step.in_group)
                    worker.await_start(on_progress)
                    start = time.monotonic()
                    on_progress(step.title)
                    answer = self.run_step(step, worker, on_progress, folder)
                except KeyboardInterrupt:
                    self.add(name, step, start, {"status": "stopped", "detail": "interrupted"})
                    self.skip("not run")
                    raise
                except StartError as error:
                    self.add(name, step, start, {"status": "failed", "detail": str(error)})
                    self.skip("not run")
                    break
                self.add(name, step, start, answer)
        return self.results

    def skip(self, reason: str) -> None:
        """Add the steps that have no result yet as skipped."""
        done = {result["name"] for result in self.results}
        for name, step in self.steps.items():
            if name not in done:
                self.add(name, step, time.monotonic(), {"status": "skipped", "detail": reason})

    def run_step(self, step: Step, worker: Worker, on_progress: Callable[[str], None], folder: str) -> dict[str, Any]:
        """Return the answer to a step with its status."""
        limit = step.seconds if self.limit is None else self.limit
        request = {"folder": folder, "device": self.device, "seconds": self.seconds, "limit": limit}
        try:
            answer = worker.run(step, request, on_progress)
        except TimeoutError as error:
            worker.end()
            return {"status": "timeout", "detail": str(error)}
        if "error" in answer:
            return {"status": "failed", "detail": answer["error"]}
        return {"status": "ok"} | answer

    def add(self, name: str, step: Step, start: float, answer: Mapping[str, Any]) -> None:
        """Add the result of a step."""
        seconds = round(time.monotonic() - start, 2)
        facts = {"name": name, "title": step.title, "status": answer["status"], "seconds": seconds}
        self.results.append(StepResult(**facts, detail=answer["detail"], values=answer.get("values", {})))

    @contextmanager
    def open_workers(self, folder: Path, environment: Mapping[str, str]) -> Iterator[Callable[[bool], Worker]]:
        """Yield a function that returns a living worker, alone or as one of the group; all are ended afterwards."""
        workers: dict[bool, Worker] = {}
        modules = dict.fromkeys(step.function.partition(":")[0] for step in self.steps.values())
        alone = {name: value for name, value in environment.items() if not is_distributed(name)}
        alone |= {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}  # the user's caches stay as they are

        def get_worker(in_group: bool) -> Worker:
            if in_group not in workers or not workers[in_group].is_alive:
                own = Path(tempfile.mkdtemp(prefix="worker-", dir=folder))
                variables = dict(environment) | dict(self.group or {}) if in_group else alone
                workers[in_group] = Worker(own, variables, modules)
            return workers[in_group]

        try:
            yield get_worker
        finally:
            for worker in workers.values():
                worker.end()


def is_distributed(name: str) -> bool:
    """Return whether a variable makes a process part of a group."""
    return name in DISTRIBUTED or name.startswith(("TORCHELASTIC_", "ROLE_", "GROUP_"))
