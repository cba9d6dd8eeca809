"""What a node says when it cannot start: one line that names the remedy, exit code 2, no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from engine.config.flags import host_port
from lab.launch import cluster
from lab.launch.cluster import ROOT
from lab.launch.nodes import thread_environment, threads_per_node
from tests.e2e.conftest import Start


def run(*flags: str) -> tuple[int, str]:
    """(exit code, stderr) of a node that cannot start. It is forked like the nodes of clusters: its imports would take
    longer than all that is asked here."""
    plan = [("a", "mixed"), ("b", "mixed")]
    env = os.environ | thread_environment(plan, threads_per_node(plan))
    command = [sys.executable, str(ROOT / "mooncake.py"), *flags]
    node = cluster.spawn("cannot-start", "mixed", command, Path(tempfile.mkdtemp()), env)
    try:
        return node.process.wait(120), node.log.read_text()
    finally:
        node.destroy()


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--blok-size", "16"], "--block-size"),
        (["--role", "prefil"], "prefill"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--join", "127.0.0.1:1", "--role", "store"], "--join 127.0.0.1:1"),
        (["--role", "store", "--port", "0", "--ssd-path", "/proc/nowhere"], "--ssd-path"),
        (["--role", "store", "--port", "0", "--cluster-key-file", "/nowhere"], "--cluster-key-file /nowhere"),
    ],
)
def test_wrong_flags(flags, remedy):
    code, told = run(*flags)
    assert code == 2, told
    assert "Traceback" not in told and "max-num-seqs" not in told, "the error stands alone, without the configuration"
    assert remedy in told.splitlines()[-1]


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_a_busy_control_port_is_named(kind):
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind is socket.SOCK_STREAM:
            taken.listen()
        port = str(taken.getsockname()[1])
        code, told = run("--role", "store", "--port", "0", "--control-port", port)
    assert code == 2 and "Traceback" not in told, told
    last = told.splitlines()[-1]
    assert f"--control-port {port} on 127.0.0.1: " in last and "give another one that is free for TCP and UDP" in last


def test_a_signal_ends_a_node_that_compiles_its_kernels_and_the_compiler(tmp_path):
    """Compiling takes a minute on a busy machine, reading large weights longer. Nobody waits for either."""
    told = tmp_path / "told"
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo stand-in && exit\n[ -e {told} ] && exit 1\n'
        f"sh -c 'echo $$ >{told}.part && mv {told}.part {told} && exec sleep 1000'\n"
    )
    compiler.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "mooncake.py"), "--port", "0", "--control-port", "0"]
    node = cluster.spawn("compiles", "mixed", command, tmp_path, env)
    try:
        while not told.exists():
            assert node.alive, node.log.read_text()
            time.sleep(0.02)
        node.process.terminate()
        assert node.process.wait(60) == 0, "the first signal; the compiler would take 1000 s"
        compiling = Path("/proc", told.read_text().strip(), "stat")
        with suppress(OSError):  # reaped
            while compiling.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)  # without the kill it would go on for 1000 s: the test's own limit of time ends this
    finally:
        node.destroy()


def test_a_python_without_the_packages_names_the_set_up():
    command = [sys.executable, "-S", str(ROOT / "mooncake.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1) and "scripts/setup" in done.stderr


def test_what_an_existing_cluster_does_not_allow(start: Start, tiny_model, tmp_path):
    key = tmp_path / "key"
    key.write_text("5c" * 32)
    with start("store=1", *tiny_model, "--transport", "tcp") as running:
        door = running.nodes[0].url.removeprefix("http://")
        join = [*tiny_model, "--role", "store", "--port", "0", "--join", door]
        computes = [*tiny_model, "--role", "decode", "--port", "0", "--join", door]
        for flags, remedy in [
            ([*join, "--cluster-block-size", "32"], "--cluster-block-size 16"),
            ([*join, "--seed", "1"], "same model"),
            ([*join, "--served-model-name", "mine"], "pass --served-model-name"),
            ([*join, "--cluster-kv-dtype", "int8"], "--cluster-kv-dtype float32, not int8"),
            ([*computes, "--block-size", "24"], "give --block-size 16"),
            ([*computes, "--block-size", "8"], "a --cluster-block-size that divides both"),
            (
                [*join, "--transport", "shm"],
                "--transport shm: no transport to 'store-0': shm: the peer does not offer it",
            ),
            ([*join, "--cluster-key-file", str(key)], "give both nodes the same --cluster-key-file"),
            ([*tiny_model, "--role", "store", "--port", str(host_port(door)[1])], "--port"),
        ]:
            code, told = run(*flags)
            assert code == 2, told
            assert "Traceback" not in told
            assert remedy in told.splitlines()[-1]
        assert len(running.members("store-0")) == 1
