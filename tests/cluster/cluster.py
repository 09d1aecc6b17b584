"""A SLURM cluster of two nodes on this host: munged, slurmctld and two slurmd, with a configuration of their own.

The nodes are called 127.0.0.1 and 127.0.0.2, names that resolve on every Linux. Nothing outside a temporary directory is read or
written, and the daemons end with the process that started them.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONFIGURATION = """\
ClusterName=proof
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job may start again when its credential has expired: 120 seconds by default, 5 at least.
AuthInfo=socket={home}/munge.socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.[1-2] Port=[{ports[1]}-{ports[2]}] CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""


def missing_requirement() -> str | None:
    """Return why no cluster can be started here; None if it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"no SLURM here: {', '.join(missing)} not found (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    """The daemons of a cluster, from `with` to its end."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.environment |= {"SLURM_CONF": str(self.home / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the daemons and wait until the nodes are idle."""
        home = self.home
        (home / "state").mkdir()
        for directory in (home, home / "state"):
            directory.chmod(0o755)  # munged refuses others
        key = home / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        (home / "slurm.conf").write_text(CONFIGURATION.format(home=home, host=host, ports=find_ports()))
        files = {"key-file": key, "socket": home / "munge.socket", "pid-file": home / "munged.pid"}
        files |= {"seed-file": home / "munged.seed", "log-file": home / "munged.log"}
        self.run_daemon("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        wait_until((home / "munge.socket").exists, 20, self.describe)
        self.run_daemon("slurmctld", "-D", "-i")
        for node in ("127.0.0.1", "127.0.0.2"):
            self.run_daemon("slurmd", "-D", "-N", node)
        wait_until(lambda: self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == "2", 60, self.describe)

    def run_daemon(self, *command: str) -> None:
        """Start a daemon that Linux ends with this process."""
        with open(self.home / f"{len(self.daemons)}-{command[0]}.out", "wb") as out:
            process = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, cwd=self.home, preexec_fn=end_with_parent
            )
        self.daemons.append(process)

    def stop(self) -> None:
        """Cancel all jobs, end the daemons and remove their files."""
        if len(self.daemons) > 1:
            self.ask("scancel", "--user=root")
            deadline = time.monotonic() + 20
            while self.ask("squeue", "-h") and time.monotonic() < deadline:
                time.sleep(0.3)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def ask(self, *command: str) -> str:
        """Return the output of a command of SLURM; empty if it failed."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    def state(self, job: str) -> dict[str, str]:
        """Return what slurmctld knows of a job, by name."""
        words = self.ask("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job: str, seconds: float) -> dict[str, str]:
        """Wait until a job is not going to run any more; return its state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.state(job).get("JobState") in ended, seconds, self.describe)
        return self.state(job)

    def describe(self) -> str:
        """Return the state of the queue and the last lines of the daemons."""
        logs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.home.glob("*.out"))]
        return "\n".join([self.ask("squeue"), self.ask("sinfo", "-Nl"), *logs])


def find_ports() -> list[int]:
    """Return three free ports, the last two in succession."""
    own = 26_000 + os.getpid() % 1000 * 3  # two processes of tests look in different places
    for first in (*range(own, 32_000, 3), *range(26_000, own, 3)):
        try:
            for port in range(first, first + 3):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return [first, first + 1, first + 2]
    raise OSError("no free ports for a cluster")


def wait_until(
    condition: Callable[[], Any], seconds: float, describe: Callable[[], str], interval: float = 0.2
) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} seconds:\n{describe()}"
        time.sleep(interval)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
