"""scripts/deploy/*.sbatch under a real Slurm: four hosts, a cluster that loses one and gets it back, an ablation."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lab.launch import rest
from tests.complaints import complaints
from tests.e2e.conftest import tiny_model
from tests.lab.launchers.debian import install
from tests.lab.launchers.slurm import Slurm
from tests.lab.launchers.steady import SteadyClient, answer
from tests.lab.launchers.told import BACK, FIRST, NOTICED

__all__ = ["tiny_model"]

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "scripts/deploy"
HOSTS = 4
ARRAY, ONE_JOB = "Slurm, a job per node", "Slurm, one job"
EVERYONE = {"prefill-0", "decode-1", "decode-2", "store-3"}

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    install("slurmctld", "slurmd", "munged", packages=["slurm-wlm", "munge"])
    with Slurm(HOSTS) as running:
        yield running


@pytest.fixture
def environment(tiny_model) -> dict[str, str]:
    """The variables of mooncake.sbatch."""
    flags = [*tiny_model[2:], "--num-threads", "1", "--calibration-ms", "0", "--dram-bytes", "32M"]
    told = {"MODEL": tiny_model[1], "MOONCAKE_FLAGS": " ".join(flags), "MOONCAKE_PORT": str(free_pair())}
    return told | {"MOONCAKE_ROOT": str(ROOT), "MOONCAKE_PYTHON": sys.executable, "OMP_WAIT_POLICY": "PASSIVE"}


def free_pair() -> int:
    """A port that is free on every host, as is the control port 10000 above it. Both lie below the ports that the
    kernel hands out to connections."""
    for port in range(13_000 + os.getpid() % 5000, 22_000):
        with suppress(OSError), ExitStack() as sockets:
            for host in range(1, HOSTS + 1):
                for one in (port, port + 10_000):
                    sockets.enter_context(socket.socket()).bind((f"127.0.1.{host}", one))
            return port
    raise AssertionError("no free ports")


class Run:
    """One job of mooncake.sbatch, by what it leaves in its folder."""

    def __init__(self, job: str, folder: Path) -> None:
        self.job, self.folder = job, folder

    def url(self, rank: int) -> str:
        """Where the node of this rank said that it listens; empty before it did."""
        file = self.folder / f"mooncake-{self.job}/{rank}.address"
        return f"http://{file.read_text().strip()}" if file.exists() else ""

    def members(self, rank: int) -> set[str]:
        """Ids of the nodes that this one counts as alive; empty while it does not answer."""
        try:
            told = rest.get(f"{self.url(rank)}/cluster") if self.url(rank) else {"node_id": "", "members": []}
        except rest.RestError:
            return set()
        return {told["node_id"]} | {one["node_id"] for one in told["members"] if one["status"] == "alive"}

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("mooncake-*.log")))

    def eventually(self, condition: Callable[[], bool], what: str, within_s: float = 120.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.logs()[-6000:]}"
            time.sleep(0.25)


def test_an_array_starts_a_cluster_and_the_node_of_a_lost_host_comes_back(slurm, environment, tmp_path, told):
    """One job per node: Slurm requeues the lost one alone, and it joins the others, which answer all the time."""
    begun = time.monotonic()
    job = slurm.submit(f"--array=0-{HOSTS - 1}", str(DEPLOY / "mooncake.sbatch"), env=environment, cwd=tmp_path)
    run = Run(job, tmp_path)
    run.eventually(lambda: all(run.members(rank) == EVERYONE for rank in range(HOSTS)), "four nodes in one cluster")
    expected = answer(run.url(0))
    told(ARRAY, FIRST, time.monotonic() - begun)

    lost, others = 1, (0, 2, 3)
    host = slurm.host_of(f"{job}_{lost}")
    with SteadyClient(run.url(0)) as client:
        begun = time.monotonic()
        slurm.lose(host)
        run.eventually(
            lambda: all(run.members(rank) == EVERYONE - {"decode-1"} for rank in others), "the others see the loss"
        )
        told(ARRAY, NOTICED, time.monotonic() - begun)
        run.eventually(lambda: slurm.states(job).get(f"{job}_{lost}") == "PENDING", "Slurm requeues the job")
        slurm.revive(host)
        run.eventually(lambda: all(run.members(rank) == EVERYONE for rank in range(HOSTS)), "the lost node is back")
        told(ARRAY, BACK, time.monotonic() - begun)
    told.survived(ARRAY, len(client.answers), len(client.errors))
    assert client.errors == [] and set(client.answers) == {expected}
    assert answer(run.url(lost)) == expected

    slurm.run("scancel", "--signal=TERM", job)
    run.eventually(lambda: not slurm.states(job), "all nodes have drained")
    assert len(re.findall(r"rank \d is \w+ on [\d.:]+ and starts the cluster", run.logs())) == 1
    assert len(re.findall(r"rank \d is \w+ on [\d.:]+ and joins", run.logs())) == HOSTS  # the requeued one twice
    assert complaints(run.logs()) == []


def test_one_job_starts_a_cluster_goes_on_without_a_host_and_drains_when_cancelled(slurm, environment, tmp_path, told):
    begun = time.monotonic()
    job = slurm.submit(f"--nodes={HOSTS}", str(DEPLOY / "mooncake.sbatch"), env=environment, cwd=tmp_path)
    run = Run(job, tmp_path)
    run.eventually(lambda: all(run.members(rank) == EVERYONE for rank in range(HOSTS)), "four nodes in one cluster")
    assert len({run.url(rank) for rank in range(HOSTS)}) == HOSTS
    expected = answer(run.url(0))
    told(ONE_JOB, FIRST, time.monotonic() - begun)

    host = f"n{run.url(2).rpartition(':')[0][-1]}"  # 127.0.1.3 is n3
    with SteadyClient(run.url(0)) as client:
        slurm.lose(host)
        run.eventually(lambda: slurm.run("sinfo", "-h", "-n", host, "-o", "%t") == "down*", "Slurm gives up the host")
        time.sleep(3)
        assert slurm.states(job) == {job: "RUNNING"} and run.members(0) == EVERYONE - {"decode-2"}
    told.survived(ONE_JOB, len(client.answers), len(client.errors))
    assert client.errors == [] and set(client.answers) == {expected}

    slurm.run("scancel", job)
    run.eventually(lambda: not slurm.states(job), "all nodes have drained")
    assert complaints(run.logs()) == []
    slurm.revive(host)


def test_an_array_runs_ablations(slurm, tmp_path):
    environment = {"MOONCAKE_ROOT": str(ROOT), "MOONCAKE_PYTHON": sys.executable}
    names = ["ratio", "gossip"]
    script = [str(DEPLOY / "ablation.sbatch"), *names, "--", "--requests", "60", "--seeds", "1"]
    job = slurm.submit("--array=0-1", *script, env=environment, cwd=tmp_path)
    run = Run(job, tmp_path)
    run.eventually(lambda: not slurm.states(job), "both tasks have ended", 240)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("ablation-*.log"))
    for name in names:
        file = tmp_path / f"ablations-{job}/{name}.json"
        assert file.exists(), logs
        assert json.loads(file.read_text())["config"]["ablation"] == name
