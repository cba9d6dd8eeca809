"""Scenarios that must not pass for nothing: flags that name no fault, faults that hit nothing, clients that died."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
from aiohttp import web

from lab.faults import FAULTS, checks, exhaustion, kill_roles, put_histories, rolling_restart, runner, stop_nodes
from lab.faults.client import Load, Stream
from lab.faults.histories import Operation, linearizable
from lab.faults.runner import Run
from lab.faults.soak import tier
from lab.faults.soak.holders import Gets
from lab.faults.soak.load import nothing_read
from lab.launch.cluster import NodeDied
from tests.lab.faults.test_client import TOKENS, send, served, whole


def no_cluster(*_: object, **__: object) -> None:
    raise AssertionError("a cluster was made")


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("kill-roles", ["--roles", "decod"]),
        ("kill-roles", ["--tokens", "2"]),
        ("exhaustion", ["--cases", "control,freez"]),
        ("cut-nodes", ["--cases", "decode"]),
        ("cut-nodes", ["--cases", "decode:sideways"]),
        ("cut-nodes", ["--cases", "mixed:both"]),
        ("cut-nodes", ["--nodes", "mixed=2"]),
        ("cut-nodes", ["--tokens", "1"]),
        ("cut-sites", ["--tokens", "1"]),
        ("stop-nodes", ["--victims", "prefill-9"]),
        ("stop-nodes", ["--victims", "store-0"]),
        ("stop-nodes", ["--nodes", "mixed=1"]),
        ("role-changes", ["--nodes", "3"]),
        ("ranks", ["--ranks", "1"]),
        ("ranks", ["--tokens", "2"]),
        ("ranks-soak", ["--ranks", "1"]),
        ("migrations", ["--tokens", "8"]),
        ("churn", ["--survivors", "1.5"]),
        ("rolling-restart", ["--json", "."]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_begins(name, argv, monkeypatch, capsys):
    monkeypatch.setattr(runner, "LocalCluster", no_cluster)
    with pytest.raises(SystemExit) as stopped:
        import_module(FAULTS[name]).main(argv)
    assert stopped.value.code == 2
    assert argv[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_soak_of_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        import_module(FAULTS["soak"]).main([])
    assert "--kills" in capsys.readouterr().err.splitlines()[-1]


# --- kill-roles


class OneNode:
    """A cluster whose nodes all have this URL."""

    def __init__(self, url: str) -> None:
        self.node, self.killed = SimpleNamespace(url=url), list[str]()

    def __getitem__(self, name: str) -> SimpleNamespace:
        return self.node

    def kill(self, name: str) -> None:
        self.killed.append(name)


async def test_no_node_dies_when_all_streams_have_ended():
    async with served(whole, []) as url:
        cluster = OneNode(url)
        with pytest.raises(TimeoutError, match="raise --tokens"):
            await kill_roles._killed(cluster, kill_roles.SHAPES["pairs"], [{}, {}], "decode", len(TOKENS))
    assert cluster.killed == []


async def test_a_node_dies_while_streams_run():
    died = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await send(response, TOKENS[:5])
        await died.wait()
        await send(response, TOKENS[5:])
        await response.write(b"data: [DONE]\n\n")
        return response

    async with served(half, []) as url:
        cluster = OneNode(url)
        cluster.kill = lambda name: (cluster.killed.append(name), died.set())
        load, _ = await kill_roles._killed(cluster, kill_roles.SHAPES["pairs"], [{}, {}], "decode", len(TOKENS))
    assert cluster.killed == ["decode-0"] and [one.tokens for one in load.streams] == [TOKENS, TOKENS]


# --- stop-nodes


def test_a_victim_that_never_gets_work_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(stop_nodes, "BUSY_S", 0.05)
    state = {"engine": {"held_for_requests": {"requests": 1}}}
    monkeypatch.setattr(stop_nodes.rest, "get", lambda url: state)
    with pytest.raises(TimeoutError, match="raise --clients"):
        stop_nodes._until_busy(OneNode("http://x"), "prefill-0")


# --- exhaustion


async def test_a_flood_that_reaches_nobody_is_wrong(monkeypatch):
    monkeypatch.setattr(exhaustion, "NOTICE_S", 0.1)
    monkeypatch.setattr(exhaustion.rest, "get", lambda url: {})
    node = SimpleNamespace(url="http://127.0.0.1:9", control=("127.0.0.1", 9))
    cluster = SimpleNamespace(nodes=[node])
    async with exhaustion.flood(cluster, "control", 5) as found:
        pass
    assert found.wrong == ["only 0 of 5 silent connections could be opened: that is no flood"]


# --- rolling-restart


class Leaving:
    """A cluster whose only node ends with this code when it leaves."""

    def __init__(self, code: int) -> None:
        process = SimpleNamespace(wait=lambda timeout: code)
        self.nodes = [SimpleNamespace(name="mixed-0", url="http://x", role="mixed", process=process)]

    def __getitem__(self, name: str) -> SimpleNamespace:
        return self.nodes[0]

    def restart(self, name: str) -> SimpleNamespace:
        return self.nodes[0]

    def last_words(self, node: SimpleNamespace) -> str:
        return f"{node.name} ended"


class NoLoad:
    """A load that sends nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        self.requests = [(0, Stream())]

    async def __aenter__(self) -> NoLoad:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def until(self, due: Callable[[], bool]) -> None:
        assert due()


@pytest.mark.parametrize("code", [0, 1, -11])
async def test_a_node_that_crashes_when_it_leaves_is_found(code, monkeypatch):
    async def drained(url: str) -> None:
        pass

    monkeypatch.setattr(rolling_restart, "drain", drained)
    monkeypatch.setattr(rolling_restart, "Load", NoLoad)
    if not code:
        await rolling_restart.restart_all(Leaving(code), [{}], ["mixed-0"], 1, 1)
        return
    with pytest.raises(NodeDied, match="mixed-0 ended"):
        await rolling_restart.restart_all(Leaving(code), [{}], ["mixed-0"], 1, 1)


def test_other_tokens_after_a_restart_are_found(tmp_path, monkeypatch):
    @contextmanager
    def cluster(self: Run, nodes: str, flags: list[str]) -> Iterator[Leaving]:
        assert flags[:2] == ["--dtype", "float32"]
        yield Leaving(0)

    async def restarted(*_: object) -> Load:
        load = Load([], [{"max_tokens": 2}], "rolling")
        load.requests = [(0, Stream(tokens=[1, 2])), (0, Stream(tokens=[1, 3]))]
        return load

    monkeypatch.setattr(Run, "cluster", cluster)
    monkeypatch.setattr(Run, "bodies", lambda *_: [{"max_tokens": 2}])
    monkeypatch.setattr(Run, "calm", lambda *_: [Stream(tokens=[1, 2])])
    monkeypatch.setattr(rolling_restart, "restart_all", restarted)
    monkeypatch.setattr(runner, "settle", lambda cluster: [])
    monkeypatch.setattr(runner, "blocks_held", lambda cluster: 0)
    flags = {"nodes": "mixed=2", "requests": 2, "width": 1, "tokens": 2, "tiny": False, "seed": 1}
    this = Run(Namespace(**flags), [], tmp_path)
    rolling_restart.play(this)
    assert this.wrong == ["all nodes restarted: stream 1 differs from token 1 on (2 tokens)"]


# --- what is held


def test_slots_of_a_share_that_a_lease_holds_are_found(monkeypatch):
    """Nodes that only keep values have no engine; a value that is pinned holds its slot for good."""
    dram = {"held": 5, "pinned": 3, "reserved": 1}
    states = {"http://a/debug/state": {"engine": None, "store": {"dram": dram}}}
    states["http://b/debug/state"] = {"engine": None, "store": None}
    monkeypatch.setattr(checks.rest, "get", lambda url, key: states[url])
    nodes = [SimpleNamespace(name=name, url=f"http://{name}", alive=True) for name in "ab"]
    cluster = SimpleNamespace(nodes=nodes, api_key=None)
    monkeypatch.setattr(checks, "LEASED_S", 0.0)
    held, reserved = checks.settle(cluster)
    assert held == "a: 2 slots of its share are still held" and "a: 1 slots" in reserved
    dram |= {"held": 3, "reserved": 0}
    assert checks.settle(cluster) == []


# --- the store


def test_a_history_without_an_answered_put_proves_nothing():
    failed = [Operation("put", 0, 1, b"v", False, True), Operation("get", 2, 3, None, None)]
    assert linearizable(failed)
    rows, wrong = put_histories.judged_calm({7: failed, 8: [Operation("put", 0, 1, b"v", True)]})
    assert wrong == ["key 7 in calm: no put was answered"]
    assert {row.metric: row.ours for row in rows}["puts that failed"] == 1.0


def test_a_cut_through_which_the_sides_see_each_other_is_found():
    seen = [Operation("put", 0, 1, b"v", True), Operation("put", 2, 3, b"w", False)]
    both = [Operation("put", 0, 1, b"v", True), Operation("put", 2, 3, b"w", True)]
    assert put_histories.not_parted({1: seen, 2: both}) == []
    assert put_histories.not_parted({1: seen}) != []


def test_a_get_that_raises_is_no_end_of_the_gets():
    class Broken:
        def get(self, key: bytes) -> None:
            raise ConnectionError("gone")

    gets = Gets(Broken(), random.Random(1))
    gets._thread.join()
    with pytest.raises(RuntimeError, match="a get failed: ConnectionError"):
        gets.end()


def test_calls_that_read_nothing_are_wrong():
    assert nothing_read({"calls": 9, "hits": 0, "unreachable": 9}) != []
    assert nothing_read({"calls": 9, "hits": 1, "unreachable": 8}) == []


ALIVE = """
print('{"here": [], "wrong": 0, "capacity": 9}', flush=True)
while True: print(0, flush=True)
"""


@pytest.mark.parametrize(
    ("code", "lives", "failed"), [("raise SystemExit(1)", 0, 1), (ALIVE, 3, 3)], ids=["dies", "writes nothing"]
)
def test_a_tier_that_does_not_work_is_not_one_that_loses_nothing(code, lives, failed, tmp_path, monkeypatch):
    begun = list[subprocess.Popen]()

    def started(command: list[str], **how: object) -> subprocess.Popen:
        begun.append(subprocess.Popen([command[0], "-S", "-c", code], **how))
        return begun[-1]

    monkeypatch.setattr(tier, "subprocess", SimpleNamespace(Popen=started, PIPE=subprocess.PIPE, DEVNULL=-3))
    counts = tier.kills(2, tmp_path, 7, "lmdb")
    assert (counts["lives"], counts["failed"], counts["lost"]) == (lives, failed, 0)
    assert all(one.returncode is not None for one in begun)


def test_no_life_outlives_a_round_that_breaks_off(tmp_path, monkeypatch):
    begun = list[subprocess.Popen]()

    def started(command: list[str], **how: object) -> subprocess.Popen:
        begun.append(subprocess.Popen([command[0], "-S", "-c", ALIVE], **how))
        return begun[-1]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tier, "subprocess", SimpleNamespace(Popen=started, PIPE=subprocess.PIPE, DEVNULL=-3))
    monkeypatch.setattr(tier.Life, "report", interrupted)
    for rounds in (tier.kills, tier.flips):
        with pytest.raises(KeyboardInterrupt):
            rounds(2, tmp_path, 7, "lmdb")
    assert [one.returncode for one in begun] == [-signal.SIGKILL] * 2
