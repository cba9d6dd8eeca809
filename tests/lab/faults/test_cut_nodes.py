"""What the cut and the role-change benchmarks read off their runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults.client import Stream, random_bodies
from lab.faults.cut_nodes import case_rows
from lab.faults.networks.namespaces import Namespaces
from lab.faults.role_changes import changes_in, phase_rows

ROOT = Path(__file__).resolve().parents[3]


def test_waits_count_from_the_cut_or_from_the_request():
    streams = [
        Stream(begun=0.0, at=[1.0, 9.0, 14.0]),  # under way at the cut
        Stream(begun=9.5, at=[12.0, 12.1]),  # without a token at the cut
        Stream(begun=11.0, at=[11.5]),
        Stream(begun=11.0, error="503: no"),
    ]
    rows = {row.metric: row.ours for row in case_rows("decode cut off", streams, 10.0, 2.5)}
    assert rows["streams cut"] == 1.0 and rows["longest pause p99"] == pytest.approx(5.0)
    assert rows["longest wait for a first token"] == pytest.approx(2.0)
    assert rows["heal to one cluster"] == 2.5


def test_bodies_follow_the_seed():
    assert random_bodies(3, 5, 7, 1) == random_bodies(3, 5, 7, 1) != random_bodies(3, 5, 7, 2)
    assert {body["max_tokens"] for body in random_bodies(3, 5, 7, 1)} == {7}


def test_every_namespace_has_an_address_of_its_own():
    network = Namespaces(["a", "b"])
    assert network.host("a") == "10.77.0.1" and network.host("b") == "10.77.0.2"


CUTS = """
import subprocess, sys, time
from lab.faults.cut_nodes import reachable
from lab.faults.networks.namespaces import Namespaces, NoNamespaces
try:
    with Namespaces(["a"]) as network:
        code = f"import socket, time; s = socket.create_server(('{network.host('a')}', 8000)); time.sleep(600)"
        server = subprocess.Popen([*network.prefix("a"), sys.executable, "-S", "-c", code])
        url = f"http://{network.host('a')}:8000"
        try:
            for way in ("both", "in", "out"):
                while not reachable(url):
                    assert server.poll() is None
                    time.sleep(0.05)
                network.cut("a", way)
                assert not reachable(url), way
                network.heal("a")
        finally:
            server.kill()
            server.wait()
except NoNamespaces as reason:
    sys.exit(f"no namespaces: {reason}")
"""


def test_a_cut_node_cannot_be_reached_and_a_healed_one_can():
    """In a process of its own: it enters a network namespace for good."""
    done = subprocess.run([sys.executable, "-c", CUTS], cwd=ROOT, capture_output=True, text=True, check=False)
    if "no namespaces" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def test_a_node_that_does_something_else_has_changed():
    layouts = [{"a": "prefill+decode"}, {"a": "prefill", "b": "decode"}, {"b": "decode"}]
    assert changes_in(layouts) == 1
    streams = [Stream(begun=1.0, at=[3.0], tokens=[1, 2])]
    rows = {row.metric: row.ours for row in phase_rows("phase 0", 2.0, streams, layouts[-1], 1)}
    assert rows == {"output tokens": 1.0, "first token p50": 2.0, "role changes": 1.0}
