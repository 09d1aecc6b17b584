"""Batch scripts of `--slurm`: settings, script and submission. No command of its own."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitrail.cli.options import CommandParser, print_result, suggest_option
from vitrail.utils.slurm import REQUEUE_CODE

# Key: its help. The description of the option and the messages about unknown keys read this table.
KEYS = {
    "nodes": "number of nodes [1]",
    "gpus": "GPUs per node, each with a process: 8, or with a type, a100:8 [none]",
    "tasks": "processes per node, on the CPU [1]",
    "cpus": "cores per process, for PyTorch and the processes that decode images [the cluster's]",
    "mem": "memory per node: 64G [the cluster's]",
    "time": "time limit: minutes, H:MM:SS or D-HH:MM:SS [the partition's]",
    "signal": "seconds before the time limit at which the job saves and is requeued [120]",
    "restarts": "times that the job may be requeued; 0 for never [100]",
    "partition": "partition, or several with commas",
    "account": "account",
    "qos": "quality of service",
    "constraint": "features that the nodes must have",
    "name": "name of the job [the name of OUT]",
    "setup": "shell file that the script reads first: modules, environment variables",
}
ARRAY = {"array": "jobs of the array; each runs cells until none is missing [4]"}
COUNTS = {"nodes": 1, "tasks": 1, "cpus": 1, "array": 1, "signal": 1, "restarts": 0}  # and their minimums
MAX_SIGNAL_SECONDS = 65_535
EARLY_SECONDS = 60  # by which SLURM may send the signal too early
LEAVING_SECONDS = 60  # from the end of the first process to that of the others
TIME_FORMATS = (  # of sbatch
    r"(?P<m>\d+)",
    r"(?P<m>\d+):(?P<s>\d+)",
    r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
)
REQUEUE = """\
# {code}: a checkpoint was saved, because of SIGUSR1 before the time limit or SIGTERM before a preemption.
# A job that was cancelled is not running any more, and stays cancelled.
if [ "$code" -eq {code} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ] &&
    [ -n "$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING --format=%i)" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi"""
UNIT_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


@dataclass(frozen=True)
class Job:
    """The settings of `--slurm`."""

    nodes: int = 1
    gpus: str | None = None  # per node, perhaps with a type before the number
    tasks: int = 1  # per node
    cpus: int | None = None
    mem: str | None = None
    time: str | None = None
    signal: int = 120
    restarts: int = 100
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    name: str | None = None
    setup: str | None = None
    array: int | None = None

    @property
    def processes(self) -> int:
        """Return the number of processes on all nodes."""
        return self.nodes * self.tasks

    def list_directives(self, name: str, output: str) -> list[str]:
        """Return the options of sbatch."""
        given = {"partition": self.partition, "account": self.account, "qos": self.qos, "constraint": self.constraint}
        given |= {"nodes": self.nodes, "ntasks-per-node": self.tasks, "gres": self.gpus and f"gpu:{self.gpus}"}
        given |= {"cpus-per-task": self.cpus, "mem": self.mem, "time": self.time}
        given |= {"array": self.array and (f"1-{self.array}" if self.array > 1 else "1")}
        options = [f"job-name={self.name or name}", f"chdir={os.getcwd()}", f"output={output}", "open-mode=append"]
        options += [f"{option}={value}" for option, value in given.items() if value is not None]
        options += [f"signal=USR1@{self.signal}", "requeue" if self.restarts else "no-requeue"]
        return [f"#SBATCH --{quote_directive(option)}" for option in options]


@dataclass(frozen=True)
class Restart:
    """Arguments of `vitrail` where a job starts again, which is known from the existence of a file."""

    marker: str
    arguments: Sequence[str]


@dataclass(frozen=True)
class Script:
    """A batch script, the file that it is written to, and the log of its job."""

    path: str
    log: str
    text: str


def add_slurm_options(parser: CommandParser, array: bool = False) -> None:
    """Add --slurm and --submit, with their keys in the description of the group."""
    keys = KEYS | (ARRAY if array else {})
    width = max(map(len, keys)) + 2
    lines = [f"  {name:<{width}}{text}" for name, text in keys.items()]
    group = parser.add_group("SLURM cluster", "\n".join(["keys of --slurm, all optional:", *lines]))
    example = "partition=gpu,time=8:00:00,array=8" if array else "nodes=2,gpus=8,time=4:00:00"
    text = f"write and print the batch script OUT.slurm.sh instead of running: {example}, or '' for one process"
    group.add_option("--slurm KEY=VALUE,…", text, partial(parse_job, array=array))
    group.add_option("--submit", "with --slurm: submit the script with sbatch")


def parse_job(text: str, array: bool = False) -> Job:
    """Return the job of "nodes=2,gpus=8,time=4:00:00"; a part without "=" belongs to the value before it."""
    keys, values = KEYS | (ARRAY if array else {}), dict[str, Any]()
    for part in re.split(r",(?=[^,=]*=)", text) if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise argparse.ArgumentTypeError(f"{part!r}: write KEY=VALUE, for example nodes=2,gpus=8,time=4:00:00")
        if key not in keys:
            hint = suggest_option(key, list(keys), "--help").replace("see --help", f"use {', '.join(keys)}")
            raise argparse.ArgumentTypeError(f"unknown key {key!r}: {hint}")
        if key in values:
            raise argparse.ArgumentTypeError(f"{key} is given twice: {part!r} is the second")
        if re.search(r"[\x00-\x1f]", value):
            raise argparse.ArgumentTypeError(f"{key}={value!r} has control characters: leave them out")
        values[key] = PARSERS.get(key, lambda _, value: value)(key, value)
    if "gpus" in values:
        if "tasks" in values:
            raise argparse.ArgumentTypeError("tasks is for CPUs, and each of the GPUs has a process: leave out tasks")
        values["tasks"] = int(values["gpus"].rpartition(":")[2])
    defaults: dict[str, Any] = {"array": 4} if array else {}
    job = Job(**defaults | values)
    seconds = None if job.time is None else read_seconds(job.time)
    if seconds is not None and seconds <= job.signal + EARLY_SECONDS:
        minimum = f"signal={job.signal} seconds and the minute by which SLURM may be early"
        raise argparse.ArgumentTypeError(f"time={job.time} must be longer than {minimum}: raise time or lower signal")
    return job


def parse_number(key: str, value: str) -> int:
    """Return the whole number of a key."""
    minimum = COUNTS[key]
    if not (value.isascii() and value.isdecimal()) or int(value) < minimum:
        raise argparse.ArgumentTypeError(f"{key} must be a whole number >= {minimum}, got {value!r}")
    if key == "signal" and int(value) > MAX_SIGNAL_SECONDS:
        raise argparse.ArgumentTypeError(f"signal must be <= {MAX_SIGNAL_SECONDS} seconds, got {value}")
    return int(value)


def parse_gpus(key: str, value: str) -> str:
    """Return "8" or "a100:8"."""
    if not re.fullmatch(r"([\w.-]+:)?[1-9]\d{0,3}", value, re.ASCII):
        raise argparse.ArgumentTypeError(f"gpus must be a number per node, such as 8 or a100:8, got {value!r}")
    return value


def parse_memory(key: str, value: str) -> str:
    """Return "64G"."""
    if not re.fullmatch(r"\d+[KMGT]?", value, re.ASCII | re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"mem must be a size per node, such as 64G, got {value!r}")
    return value


def parse_time(key: str, value: str) -> str:
    """Return a time limit in a format of sbatch."""
    if value.lower() in ("unlimited", "infinite"):
        return "UNLIMITED"
    seconds = read_seconds(value)
    if not seconds:
        hint = "minutes, H:MM:SS or D-HH:MM:SS, such as 90, 4:00:00 or 2-12:00:00"
        raise argparse.ArgumentTypeError(f"time must be {hint}, got {value!r}")
    return value


def read_seconds(text: str) -> int | None:
    """Return the seconds of a time limit; None for UNLIMITED and other texts."""
    for form in TIME_FORMATS:
        if found := re.fullmatch(form, text, re.ASCII):
            return sum(int(number) * UNIT_SECONDS[unit] for unit, number in found.groupdict().items())
    return None


def parse_setup(key: str, value: str) -> str:
    """Return the absolute path of a shell file."""
    if not os.path.isfile(value):
        raise argparse.ArgumentTypeError(f"setup={value} is not a file: give a shell file, such as setup.sh")
    return os.path.abspath(value)


PARSERS: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(COUNTS, parse_number),
    "gpus": parse_gpus,
    "mem": parse_memory,
    "time": parse_time,
    "setup": parse_setup,
}


def write_job(options: argparse.Namespace, out: str, restart: Restart | None = None, group: bool = True) -> int:
    """Write and print the batch script of a command, submit it with --submit, and return the exit code.

    Without `restart` the command itself continues what it finds in `out`. Processes of a `group` end together.
    """
    where = os.path.normpath(out)
    path = f"{os.path.abspath(where) if os.path.basename(where) in ('.', '..') else where}.slurm.sh"
    if options.submit and shutil.which("sbatch") is None:
        remedy = f"leave it out, and submit {path} on a login node"
        raise ValueError(f"--submit needs sbatch, which is not in PATH: {remedy}")
    script = build_script(options.slurm, path, remove_options(options.arguments), restart, group)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(script.text)
    os.chmod(path, 0o755)
    command = ["sbatch", path]
    number = submit(command) if options.submit else None
    record = {"script": path, "log": script.log, "run": out, "command": command, "job": number, "text": script.text}
    lines = [script.text, f"script  {path}"]
    if number is None:
        lines += [f"submit  {shlex.join(command)}"]
    else:
        lines += [f"job     {number}", f"log     {script.log}", f"cancel  scancel {number}"]
    return 0 if options.quiet and not options.json else print_result(options, record, lines)


def build_script(job: Job, path: str, arguments: Sequence[str], restart: Restart | None, group: bool) -> Script:
    """Return the batch script that runs `vitrail` with these arguments."""
    base = os.path.abspath(path.removesuffix(".sh"))
    if re.search(r"[\x00-\x1f\\]", base):
        reason = "has a backslash or control characters, which sbatch cannot read in the path of a log"
        raise ValueError(f"{base!r} {reason}: choose another directory")
    log = f"{base}-*.log" if job.array else f"{base}.log"
    output = f"{base.replace('%', '%%')}{'-%a' if job.array else ''}.log"
    program = (sys.executable, "-m", "vitrail")
    name = os.path.basename(path).removesuffix(".slurm.sh")
    lines = ["#!/bin/bash"]
    lines += ["# Written by `vitrail --slurm`, which overwrites it. Options before its name replace those below:"]
    lines += [f"# sbatch --time=1-00:00:00 {shlex.quote(path)}", *job.list_directives(name, output), ""]
    if job.setup:
        lines += [f"source {shlex.quote(job.setup)}"]
    lines += ['export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"', ""]
    lines += [f"command=({shlex.join([*program, *arguments])})"]
    if restart is not None:
        lines += [f"if [ -e {shlex.quote(restart.marker)} ]; then  # requeued, or submitted again: the run exists"]
        lines += [f"    command=({shlex.join([*program, *restart.arguments])})", "fi"]
    # A process that fails leaves others waiting for it. They are not killed at once, because they may be leaving too.
    limit = f" --wait={LEAVING_SECONDS}" if group and job.processes > 1 else ""
    cores = ' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if job.cpus else ""  # srun does not take it from sbatch
    lines += [f'srun{limit}{cores} "${{command[@]}}"', "code=$?", ""]
    if job.restarts:
        lines += [REQUEUE.format(code=REQUEUE_CODE, restarts=job.restarts)]
    return Script(path, log, "\n".join([*lines, 'exit "$code"', ""]))


def quote_directive(option: str) -> str:
    """Return an option as a line of #SBATCH has it: quoted if it has spaces or signs."""
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return option
    escaped = re.sub(r'([\\"])', r"\\\1", value)
    return f'{name}{equals}"{escaped}"'


def remove_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without --slurm, --submit and --json."""
    kept: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            kept += [argument, *left]
        elif argument == "--slurm":
            next(left)
        elif argument not in ("--submit", "--json") and not argument.startswith("--slurm="):
            kept.append(argument)
    return kept


def submit(command: Sequence[str]) -> str:
    """Submit a script with sbatch; return the job ID."""
    done = subprocess.run([command[0], "--parsable", *command[1:]], capture_output=True, text=True)
    if done.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.strip().splitlines()]
        reason = "; ".join(lines) or f"exit code {done.returncode}"
        raise ValueError(f"sbatch refused {command[-1]}: {reason}")
    return done.stdout.strip().splitlines()[-1].partition(";")[0]
