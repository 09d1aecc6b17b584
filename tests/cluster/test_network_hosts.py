"""Hosts that are cut off from the network, by their own network namespaces; the script beside this does more."""

import time
from pathlib import Path

import pytest

from tests.hostile.network_hosts import TRAIN, Training, build_network, find_obstacle
from tests.training.runs import newest

SECONDS = 300  # on a busy machine


@pytest.mark.slow
def test_processes_notice_that_a_host_is_cut_off(tmp_path: Path) -> None:
    """Both sides end at once instead of waiting six hours in a collective: the launcher can then start them again."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    arguments = ("digits", *TRAIN, "--steps", "100000")
    with build_network(2, tmp_path / "logs") as hosts:
        run = Training(hosts, tmp_path, arguments, lost_after=12.0, restarts=0)
        for host in hosts:
            run.start(host)
        end = time.monotonic() + SECONDS
        while newest(tmp_path / run.job) < 2:
            assert time.monotonic() < end, hosts[0].log.read_text()
            time.sleep(0.1)
        hosts[1].cut(down=True)
        while not all("this process ends; resume from the last checkpoint" in host.log.read_text() for host in hosts):
            assert time.monotonic() < end, "\n".join(host.log.read_text() for host in hosts)
            time.sleep(0.1)
