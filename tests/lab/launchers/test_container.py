"""scripts/deploy/Containerfile, built on a plain Debian and run by podman: by root, and by a user without rights."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pytest

from tests.e2e.conftest import complete, wait_until
from tests.lab.launchers.debian import install
from tests.lab.launchers.podman import ROOT, Mounts, Podman, make_base, pip_arguments
from tests.lab.launchers.slurm import free_ports
from tests.lab.launchers.told import FIRST, Told

IMAGE, BASE, USER = "localhost/mooncake", "localhost/base", "mooncake-lab"
TOKENS = 200

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def mounts() -> Iterator[Mounts]:
    programs = ("podman", "buildah", "crun", "debootstrap", "newuidmap")
    install(*programs, packages=["podman", "buildah", "crun", "debootstrap", "uidmap"])
    with Mounts() as mounts:
        yield mounts


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where an ordinary user may go, too; podman takes no path of 50 characters."""
    with tempfile.TemporaryDirectory(prefix="mooncake-", dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def root(mounts: Mounts, folder: Path) -> Podman:
    """Root's podman, with the image."""
    podman = Podman(mounts, folder)
    began = time.monotonic()
    make_base(podman, folder, BASE)
    arguments = [f"--build-arg=BASE={BASE}", *pip_arguments()]
    podman.build(IMAGE, ROOT / "scripts/deploy/Containerfile", ROOT, arguments)
    print(f"the image was built in {time.monotonic() - began:.0f} s")
    return podman


@pytest.fixture
def rootless(root: Podman, mounts: Mounts, folder: Path) -> Iterator[Podman]:
    """The podman of a new user."""
    archive, own = folder / "image.tar", folder / "rootless"
    root("save", "-o", str(archive), IMAGE, timeout_s=300)
    archive.chmod(0o644)
    subprocess.run(["useradd", "--create-home", USER], check=True)
    try:
        own.mkdir()
        podman = Podman(mounts, own, USER)
        podman("load", "-q", "-i", str(archive), timeout_s=600)
        yield podman
        podman("rmi", "-f", IMAGE)  # its files belong to ids of the user
    finally:
        subprocess.run(["pkill", "-KILL", "-u", USER], check=False)  # podman keeps a process for the user's namespace
        wait_until(
            lambda: subprocess.run(["pgrep", "-u", USER], check=False, capture_output=True).returncode == 1, USER
        )
        subprocess.run(["userdel", "--remove", USER], check=True, capture_output=True)


@pytest.mark.parametrize("who", ["root", "rootless"])
def test_a_node_in_a_container_is_healthy_and_drains(who: str, request: pytest.FixtureRequest, told: Told):
    """It runs without root's rights inside, the image's own health check finds it well, and on SIGTERM it ends a stream
    in flight before it leaves."""
    podman: Podman = request.getfixturevalue(who)
    (port,) = free_ports(1)
    limits = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
    run = ("run", "-d", "--name", "node", "--cgroups=disabled", "--network", "host", *limits)
    began = time.monotonic()
    with ExitStack() as stack:
        stack.callback(podman.tried, "rm", "-f", "-t", "0", "node")
        flags = ("--port", str(port), "--max-model-len", "1024", "--drain-timeout-ms", "60000")
        podman(*run, "-e", f"MOONCAKE_PORT={port}", IMAGE, *flags)
        assert podman.tried("healthcheck", "run", "node").returncode != 0, "well before it listens"
        wait_until(lambda: podman.tried("healthcheck", "run", "node").returncode == 0, "a healthy node", 600)
        url = f"http://127.0.0.1:{port}"
        answer = complete(url, "The capital of France is", 5)
        told(f"container, {who}", FIRST, time.monotonic() - began)
        assert answer["usage"]["completion_tokens"] == 5
        assert podman("exec", "node", "id", "-u").strip() == "1000"
        events: list[str] = []
        stream = Thread(target=follow, args=(url, events))
        stream.start()
        wait_until(lambda: len(events) > 2, "the first tokens of a stream")
        podman("stop", "-t", "90", "node", timeout_s=120)
        stream.join(90)
        usage = json.loads(events[-2])["usage"]
        assert events[-1] == "[DONE]" and usage["completion_tokens"] == TOKENS
        assert podman("inspect", "node", "--format", "{{.State.ExitCode}}").strip() == "0"


def follow(url: str, events: list[str]) -> None:
    """A streamed answer of TOKENS tokens: the data of its events."""
    body = {"prompt": "One, two,", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as response:
        events.extend(line.decode()[6:].strip() for line in response if line.startswith(b"data: "))
