"""Processes that SLURM's `srun` starts without torchrun: their variables, and the exit code that requeues a job.

`srun` gives each task its rank in SLURM_PROCID. `adopt_step` translates a step of several tasks into torchrun's variables, from
which everything else reads. A batch script outside `srun`, a shell of `salloc` or of `srun --pty`, and a step of one task are
single processes.
"""

import os
import re
import signal
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

SIGUSR1 = getattr(signal, "SIGUSR1", 10)  # Windows has none
REQUEUE_CODE = 128 + SIGUSR1  # of a process that saved a checkpoint for SLURM; the batch script requeues the job
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # the steps of a batch script, of an interactive shell and others
FIRST_PORT, PORTS = 10_000, 20_000  # below those that Linux gives to outgoing connections
MAX_HOSTS = 100_000


@dataclass(frozen=True)
class Step:
    """One task of a step, as `srun` describes it."""

    rank: int
    tasks: int
    local_rank: int
    local_tasks: int
    nodes: tuple[str, ...]
    port: int  # on the first node; the same on all tasks

    @property
    def variables(self) -> dict[str, str]:
        """Return torchrun's variables for this task."""
        # On one node, the loopback address is right even where the node's name cannot be resolved.
        address = self.nodes[0] if len(self.nodes) > 1 else "127.0.0.1"
        ranks = {"RANK": self.rank, "LOCAL_RANK": self.local_rank}
        sizes = {"WORLD_SIZE": self.tasks, "LOCAL_WORLD_SIZE": self.local_tasks}
        return {name: str(value) for name, value in (ranks | sizes).items()} | {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self.port),
        }


def adopt_step(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables if this process is one of several tasks of `srun`; RANK of a launcher is kept.

    MASTER_ADDR and MASTER_PORT of a batch script are kept too.
    """
    if "RANK" in environment:
        return
    step = read_step(environment)
    if step is None or step.tasks == 1:
        return
    chosen = {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environment.get(name)}
    environment.update(step.variables | chosen)
    if environment.get("CUDA_VISIBLE_DEVICES", "").strip().isdecimal():  # each task sees only its own GPU
        environment["LOCAL_RANK"] = "0"


def read_step(environment: Mapping[str, str] = os.environ) -> Step | None:
    """Return the task of `srun` that this process is; None outside `srun` and in an interactive shell."""
    name = "SLURM_STEP_ID" if "SLURM_STEP_ID" in environment else "SLURM_STEPID"
    if name not in environment or "SLURM_PTY_PORT" in environment:
        return None
    step = read_number(environment, name)
    if step >= FIRST_SPECIAL_STEP:
        return None
    tasks = read_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, local_rank = read_number(environment, "SLURM_PROCID"), read_number(environment, "SLURM_LOCALID")
    if rank >= tasks:
        raise ValueError(f"SLURM_PROCID={rank} must be < {tasks}, the number of tasks: start vitrail with srun")
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    text = next((environment[name] for name in names if environment.get(name)), "")
    if not text:
        raise ValueError("SLURM_STEP_NODELIST is not set: start vitrail with srun")
    nodes = expand_hostlist(text)
    port = FIRST_PORT + (read_number(environment, "SLURM_JOB_ID", "SLURM_JOBID") + 7_919 * step) % PORTS
    return Step(rank, tasks, local_rank, count_local_tasks(environment, tasks, nodes), nodes, port)


def read_number(environment: Mapping[str, str], *names: str) -> int:
    """Return the whole number in the first of these variables that is set."""
    name = next((name for name in names if name in environment), names[0])
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name}={text!r} must be a whole number: start vitrail with srun, which sets it")
    return int(text)


def count_local_tasks(environment: Mapping[str, str], tasks: int, nodes: tuple[str, ...]) -> int:
    """Return the number of the step's tasks on this node, from "4(x2),3"."""
    if len(nodes) == 1:
        return tasks
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} must be numbers of tasks, such as 4(x2),3: use srun")
        counts += [int(found[1])] * int(found[2] or 1)
    node = read_number(environment, "SLURM_NODEID")
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node} has no entry in SLURM_STEP_TASKS_PER_NODE={text!r}: use srun")
    return counts[node]


def count_task_cores(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the cores that SLURM gave to this task; None outside `srun` and where --cpus-per-task was not given."""
    cores = environment.get("SLURM_CPUS_PER_TASK", "")
    return int(cores) if cores.isdecimal() and read_step(environment) is not None else None


def stop_code(number: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the exit code of a process that saved a checkpoint because of a signal: 128 + its number.

    In a task of `srun`, SIGTERM has the code of SIGUSR1, which requeues: it comes before a preemption.
    """
    if number == signal.SIGTERM and read_step(environment) is not None:
        return REQUEUE_CODE
    return 128 + number


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names of a SLURM host list: "gpu[001-003,007],login2" has gpu001, gpu002, gpu003, gpu007 and login2."""
    hosts = [host for part in split_list(text) for host in expand_brackets(part, text)]
    if len(hosts) > MAX_HOSTS:
        raise ValueError(
            f"the host list {shorten(text)!r} has {len(hosts):,} names: at most {MAX_HOSTS:,} are supported"
        )
    return tuple(hosts)


def split_list(text: str) -> Iterator[str]:
    """Yield the parts between the commas that are not in brackets."""
    depth = start = 0
    for position, character in enumerate(f"{text},"):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            break
        if character == "," and depth == 0:
            if not (part := text[start:position].strip()):
                break
            yield part
            start = position + 1
    else:
        if depth == 0:
            return
    raise ValueError(f"the host list {shorten(text)!r} must be names such as gpu[001-004,007],login2")


def expand_brackets(part: str, text: str) -> list[str]:
    """Return the names of one part of a host list: each bracket is a list of numbers and ranges."""
    opening, closing = part.find("["), part.find("]")
    if opening < 0:
        return [part]
    endings = expand_brackets(part[closing + 1 :], text) if part[closing + 1 :] else [""]
    numbers: list[str] = []
    for item in part[opening + 1 : closing].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or last < first or last - first >= MAX_HOSTS:
            raise ValueError(
                f"the host list {shorten(text)!r} has the range {shorten(item)!r}: it must be like 001-004"
            )
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    if len(numbers) * len(endings) > MAX_HOSTS:
        raise ValueError(f"the host list {shorten(text)!r} has too many names: at most {MAX_HOSTS:,} are supported")
    return [f"{part[:opening]}{number}{ending}" for number in numbers for ending in endings]


def shorten(text: str, length: int = 40) -> str:
    """Return at most the first characters of a text, for a message."""
    return text if len(text) <= length else text[: length - 1] + "…"
