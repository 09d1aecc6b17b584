"""Train on several "hosts", network namespaces of this machine, while one is cut off from the network and another is killed.

Each host is a namespace with an address of its own, joined to the others by a router, and runs `torchrun` under a loop that
starts it again after a failure, as a service manager does. The run directory is on the disk that they share. Needs root and
`ip netns` (iproute2). Run as a program, it compares the disturbed run with one that nothing happened to:

    python -m tests.hostile.network_hosts --hosts 4 --out /tmp/hosts
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.training.runs import environment, last, newest

PREFIX = f"vitrail-{os.getpid()}"  # of the namespaces
PORT = 29400
TRAIN = (
    *("--batch-size", "32", "--set", "model.size.depth=1"),
    *("--set", "model.size.width=16", "--set", "model.size.heads=2", "--set", "model.size.mlp=32", "--set", "ema=EMA"),
    *("--set", "validate_every=100"),
)
MACHINE = ("--workers", "0", "--device", "cpu", "--save-seconds", "0")


def find_obstacle() -> str | None:
    """Return why this machine cannot have hosts in namespaces; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    if not torch.distributed.is_available():
        return "this PyTorch has no torch.distributed"
    name = f"{PREFIX}-probe"
    commands = (["netns", "add", name], ["-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two"])
    tried = [subprocess.run(["ip", *words], capture_output=True, text=True) for words in commands]
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    failed = next((each.stderr.strip() for each in tried if each.returncode), None)
    return failed and f"no network namespaces here: {failed}"


def ip(*words: str) -> str:
    """Run `ip` and return what it prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass
class Host:
    """A namespace with one address, and the torchrun in it."""

    number: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def name(self) -> str:
        return f"{PREFIX}-host{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.{self.number}.2"

    def cut(self, down: bool) -> None:
        """Unplug the cable of this host, at the router, or plug it in."""
        ip("-n", f"{PREFIX}-router", "link", "set", f"port{self.number}", "down" if down else "up")

    def start(self, command: list[str], variables: dict[str, str], folder: Path) -> None:
        """Start a command in the namespace."""
        self.starts += 1
        with self.log.open("ab") as log:
            log.write(f"=== start {self.starts} at {time.strftime('%H:%M:%S')}\n".encode())
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], cwd=folder, env=variables, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """Kill every process of the namespace at once, as a power cut does."""
        for pid in ip("netns", "pids", self.name).split():
            os.kill(int(pid), signal.SIGKILL)


@contextmanager
def build_network(count: int, logs: Path) -> Iterator[list[Host]]:
    """Make the namespaces of the hosts and of the router between them; kill and remove everything at the end."""
    logs.mkdir(parents=True, exist_ok=True)
    hosts, router = [Host(number, logs / f"host{number}.log") for number in range(1, count + 1)], f"{PREFIX}-router"
    try:
        ip("netns", "add", router)
        forward = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        subprocess.run(["ip", "netns", "exec", router, *forward], check=True)
        for host in hosts:
            ip("netns", "add", host.name)
            port = f"port{host.number}"
            ip("-n", router, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("-n", router, "addr", "add", f"10.77.{host.number}.1/24", "dev", port)
            ip("-n", router, "link", "set", port, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
            ip("-n", host.name, "route", "add", "default", "via", f"10.77.{host.number}.1")
        yield hosts
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError, ProcessLookupError):  # of a namespace that is not there
                host.kill()
            if host.process is not None:
                host.process.wait()
        for name in (*(host.name for host in hosts), router):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def build_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process: one thread, a cache of its own, and this source tree."""
    return environment(folder) | {"PYTHONPATH": str(Path(__file__).parents[2])}


@dataclass
class Training:
    """A training on all hosts, and the faults that it meets."""

    hosts: list[Host]
    folder: Path
    arguments: tuple[str, ...]
    processes: int = 1  # of each host
    lost_after: float = 20.0
    restarts: int = 20
    job: str = "run"
    events: list[dict[str, float | str]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def command(self, host: Host) -> list[str]:
        """Return the torchrun of a host."""
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts[0].address}:{PORT}", f"--rdzv-id={self.job}"]
        conf = f"--rdzv-conf=join_timeout=300,read_timeout={int(self.lost_after)},is_host={int(host is self.hosts[0])}"
        sizes = [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={self.processes}", f"--max-restarts={self.restarts}"]
        begun = (self.folder / self.job / "recipe.json").is_file()  # as a service's script would ask
        run = ["--resume", self.job] if begun else [*self.arguments, "--out", self.job]
        program = ["-m", "vitrail", "train", *run, *MACHINE, "--lost-after", str(self.lost_after)]
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--local-addr={host.address}"]
        return [*launcher, *rendezvous, conf, *sizes, *program]

    def start(self, host: Host) -> None:
        """Start torchrun on a host."""
        variables = build_environment(self.folder) | {"GLOO_SOCKET_IFNAME": "eth0"}
        host.start(self.command(host), variables, self.folder)

    def note(self, what: str) -> None:
        """Record an event, with the seconds since the start and the newest checkpoint."""
        step = newest(self.folder / self.job)
        self.events.append({"seconds": round(time.monotonic() - self.begin, 1), "event": what, "checkpoint": step})
        print(f"{self.events[-1]['seconds']:7.1f} s  {what} (newest checkpoint: step {step})", flush=True)

    def supervise(self) -> bool:
        """Start torchrun again where it has failed, as a service manager does; return True when all have succeeded."""
        running = False
        for host in self.hosts:
            assert host.process is not None
            code = host.process.poll()
            if code not in (None, 0):
                self.note(f"torchrun of host {host.number} ended with {code}: started again")
                assert host.starts < 20, host.log.read_text()[-3000:]
                self.start(host)
            running = running or code != 0
        return not running

    def wait_for_step(self, step: int, seconds: float = 300.0) -> None:
        """Wait for a checkpoint of this step."""
        end = time.monotonic() + seconds
        while newest(self.folder / self.job) < step:
            assert not self.supervise(), "the run ended before its fault"
            assert time.monotonic() < end, f"no step {step}"
            time.sleep(0.1)

    def finish(self, seconds: float = 600.0) -> None:
        """Wait until every torchrun has succeeded."""
        end = time.monotonic() + seconds
        while not self.supervise():
            assert time.monotonic() < end, "\n".join(host.log.read_text()[-3000:] for host in self.hosts)
            time.sleep(0.2)
        self.note("finished")


def assert_equal(run: Path, other: Path) -> int:
    """Check that weights, EMA and optimiser state, the model file and the log are the same bits; return the tensors."""
    ours, theirs = last(run), last(other)
    assert set(ours) == set(theirs)
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differ, differ
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    return len(ours)


def train_calmly(folder: Path, processes: int, arguments: tuple[str, ...]) -> None:
    """Train with as many processes on this host, where nothing happens, to the directory `calm`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = ["-m", "vitrail", "train", *arguments, *MACHINE[:-2], "--out", "calm"]
    with (folder / "calm.log").open("wb") as log:
        subprocess.run([*launcher, *program], cwd=folder, env=build_environment(folder), stderr=log, check=True)


def disturb(run: Training, steps: int, seconds: float) -> None:
    """Cut the last host off for some seconds, later kill the second one, and wait for the end."""
    for host in run.hosts:
        run.start(host)
    run.wait_for_step(steps // 6)
    cut, killed = run.hosts[-1], run.hosts[1]
    cut.cut(down=True)
    run.note(f"host {cut.number} is cut off")
    before, end = newest(run.folder / run.job), time.monotonic() + seconds
    while time.monotonic() < end:
        run.supervise()
        time.sleep(0.1)
    assert newest(run.folder / run.job) <= before + 2, "training went on without a host"
    cut.cut(down=False)
    run.note(f"host {cut.number} is back")
    if killed is not cut:
        run.wait_for_step(max(steps // 2, before + 3))
        killed.kill()
        run.note(f"host {killed.number} is killed")
    run.finish()


def stop(number: int, frame: object) -> None:
    """Stop as after Ctrl-C, so that the namespaces are removed."""
    raise SystemExit(128 + number)


def main() -> None:
    """Train twice, disturbed and undisturbed, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1, help="per host")
    parser.add_argument("--parallel", default="ddp", choices=("ddp", "fsdp", "hsdp"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lost-after", type=float, default=20.0)
    parser.add_argument("--cut", type=float, default=45.0, help="seconds without network")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if obstacle := find_obstacle():
        sys.exit(obstacle)
    signal.signal(signal.SIGTERM, stop)
    options.out.mkdir(parents=True)
    arguments = ("digits", *TRAIN, "--steps", str(options.steps), "--parallel", options.parallel)
    size = ("--shard-size", str(options.processes)) if options.parallel == "hsdp" else ()
    train_calmly(options.out, options.hosts * options.processes, (*arguments, *size))
    with build_network(options.hosts, options.out / "logs") as hosts:
        run = Training(hosts, options.out, arguments, options.processes, options.lost_after)
        disturb(run, options.steps, options.cut)
    tensors = assert_equal(options.out / "run", options.out / "calm")
    starts = {f"host {host.number}": host.starts for host in hosts}
    print(json.dumps({"equal tensors": tensors, "starts of torchrun": starts, "events": run.events}, indent=1))


if __name__ == "__main__":
    main()
