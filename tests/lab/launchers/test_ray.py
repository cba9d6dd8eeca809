"""scripts/deploy/ray_mooncake.py on a real Ray: roles by resources, a lost host, more and fewer nodes, the end."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from lab.launch import rest
from tests.complaints import complaints
from tests.e2e.conftest import tiny_model
from tests.e2e.test_scaling import CLIENTS, NAME, TOKENS, load_that_rises_and_falls
from tests.lab.launchers.ray_hosts import RayHosts, ray_folder
from tests.lab.launchers.steady import SteadyClient, answer
from tests.lab.launchers.told import BACK, FIRST

__all__ = ["tiny_model"]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = str(ROOT / "scripts/deploy/ray_mooncake.py")
JOB, CASE = "cluster", "Ray"
ADDRESS = "127.0.0.1:6400"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ray() -> Iterator[RayHosts]:
    hosts = {"127.0.0.2": {"prefill": 1}, "127.0.0.3": {"decode": 1}, "127.0.0.4": {"store": 1}}
    with RayHosts(ray_folder(), hosts) as running:
        yield running


class Job:
    """`ray job submit`, whose output is that of ray_mooncake.py."""

    def __init__(self, ray: RayHosts, *words: str, job: str = JOB) -> None:
        command = ray.command("ray", "job", "submit", "--submission-id", job, "--", "python", PROGRAM, *words)
        self.seen = ""
        self.process = subprocess.Popen(
            command, env=ray.env, cwd=ray.dir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen += line

    def until(self, pattern: str, after: int = 0, within_s: float = 240.0) -> re.Match[str]:
        """The first match behind this many characters of the output."""
        deadline = time.monotonic() + within_s
        while (found := re.compile(pattern, re.MULTILINE).search(self.seen, after)) is None:
            assert self._reader.is_alive() and time.monotonic() < deadline, f"no {pattern!r} in: {self.seen}"
            time.sleep(0.05)
        return found


def test_a_cluster_on_ray_survives_a_host_and_changes_its_size(ray, tiny_model, told):
    flags = [*tiny_model, "--calibration-ms", "0", "--dram-bytes", "32M", "--role-wait-ms", "90000"]
    takes = [word for role in ("prefill", "decode", "store") for word in ("--take", f"{role}={role}:1")]
    begun = time.monotonic()
    up = ["up", "--root", str(ROOT), "--python", sys.executable, "--strategy", "STRICT_SPREAD", *takes]
    job = Job(ray, *up, "--", *flags)
    urls = {
        name: job.until(rf"{name}: ready at (http://[\d.]+:\d+)")[1] for name in ("prefill-0", "decode-0", "store-0")
    }
    assert [urls[f"{role}-0"].split(":")[1] for role in ("prefill", "decode", "store")] == [
        "//127.0.0.2",
        "//127.0.0.3",
        "//127.0.0.4",
    ]
    door = urls["prefill-0"]
    expected = ray.inside(lambda: answer(door))
    told(CASE, FIRST, time.monotonic() - begun)

    with SteadyClient(door, ray.enter) as client:
        begun, before = time.monotonic(), len(job.seen)
        ray.lose("127.0.0.3")
        ray.add("127.0.0.5", {"decode": 2})
        job.until(r"decode-0: ready at http://127\.0\.0\.5:\d+", before)
        told(CASE, BACK, time.monotonic() - begun)
        count = len(client.answers)
        ray.run("python", PROGRAM, "scale", "--address", ADDRESS, "decode=2")
        other = job.until(r"decode-1: ready at (http://127\.0\.0\.5:\d+)")[1]
        assert ray.inside(lambda: answer(other)) == expected
        assert other in ray.run("python", PROGRAM, "status", "--address", ADDRESS)
        ray.run("python", PROGRAM, "scale", "--address", ADDRESS, "decode=1")
        job.until(r"decode-1: has left")
        for _ in range(2):  # the second changes nothing
            ray.run("python", PROGRAM, "node", "start", "decode", "more-7", "--address", ADDRESS)
        more = job.until(r"more-7: ready at (http://127\.0\.0\.5:\d+)")[1]
        ray.inside(lambda: rest.post(f"{more}/drain", {}))  # an order of its own: no loss, so no restart
        job.until(r"more-7: has left")
        assert job.seen.count("more-7: starts") == 1
    told.survived(CASE, len(client.answers), len(client.errors))
    assert client.errors == [] and set(client.answers) == {expected} and len(client.answers) > count

    ray.run("ray", "job", "stop", JOB)
    job.until(r"3 nodes have drained, 0 are killed")
    logs = "\n".join(path.read_text(errors="replace") for path in ray.dir.glob("r/session_*/logs/worker-*.err"))
    assert "mooncake" in logs and complaints(logs) == []


def test_nodes_of_a_cluster_on_ray_follow_the_load(ray, tiny_model):
    """The node that takes the requests orders another one by --scale-command, and lets it leave when they are over."""
    name = "load"
    ray.add("127.0.0.6", {"mixed": 2})
    order = [str(ray_folder() / "bin/python"), PROGRAM, "node", "{action}", "{role}", "{name}"]
    scaling = [
        "--scale-command",
        " ".join([*order, "--address", ADDRESS, "--name", name]),
        "--scale-nodes",
        "mixed=1..2",
    ]
    scaling += ["--slo", "standard:ttft=60,tbt=60", "--scale-out-ms", "400", "--scale-in-ms", "1500"]
    flags = [*tiny_model, "--served-model-name", "tiny", "--max-num-seqs", "4", "--calibration-ms", "0", *scaling]
    up = ["up", "--root", str(ROOT), "--python", sys.executable, "--name", name]
    job = Job(ray, *up, "--nodes", "mixed=1", "--take", "mixed=mixed:1", "--", *flags, job=name)
    door = job.until(r"mixed-0: ready at (http://127\.0\.0\.6:\d+)")[1]
    found = ray.inside(lambda: asyncio.run(load_that_rises_and_falls(door)))
    assert set(found) == {(TOKENS, "[DONE]")} and len(found) > CLIENTS, "no stream was cut"
    job.until(rf"{NAME}: ready at http://127\.0\.0\.6:\d+")
    job.until(rf"{NAME}: has left")
    ray.run("ray", "job", "stop", name)
    job.until(r"1 nodes have drained, 0 are killed")


def test_what_has_no_room_and_what_nobody_runs_is_said(ray):
    words = ["--address", ADDRESS, "--name", "other"]
    up = ["up", "--take", "mixed=H100:8", "--nodes", "mixed=2", "--place-s", "1"]
    for command, told in (([*up, *words], "no room for"), (["scale", "decode=2", *words], "no such cluster runs here")):
        done = subprocess.run(
            ray.command("python", PROGRAM, *command),
            env=ray.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1 and told in done.stderr, done.stderr
