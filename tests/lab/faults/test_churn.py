"""The parts of the churn: who ends and begins, what counts as growth, what a process holds, and the open load."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from itertools import islice

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.faults.soak import churn, open_load
from lab.faults.soak.churn import Soak, left_behind
from lab.faults.soak.flatness import LEAST, growth, slope
from lab.faults.soak.open_load import OpenLoad
from lab.faults.soak.processes import (
    Holding,
    connected,
    directories,
    half_closed,
    holding,
    kinds,
    links,
    of_the_dead,
    segments,
    unix_peers,
)
from lab.faults.soak.turns import AWAY_MAX_S, DRAIN, KILL, TERM, WAYS, kind_of, survivors, turns
from lab.launch.nodes import Node, parse_nodes
from net.transfer.common.memory import Region
from net.transfer.common.private_directory import PrivateDirectory
from tests.lab.faults.test_client import DEAD, TOKENS, every_third, send, served

PLANS = st.sampled_from(["prefill=10,decode=20,store=10", "prefill=1,decode=2,store=1", "decode+store=3,prefill=2"])


# --- turns


@given(PLANS, st.floats(0.01, 1.0), st.integers(0, 9), st.integers(1, 5))
def test_every_turn_ends_nodes_that_are_there_and_no_survivor(nodes, share, seed, at_once):
    plan = parse_nodes(nodes)
    kept = survivors(plan, share, seed)
    there = {name for name, _ in plan}
    sizes = Counter(map(kind_of, there))
    assert {kind_of(name) for name in kept} == set(sizes), "every role keeps a node"
    used = set(there)
    for turn in islice(turns(plan, kept, at_once, seed), 40):
        ends = [one.ends for one in turn.changes]
        assert 1 <= len(ends) <= at_once and len(set(ends)) == len(ends)
        assert set(ends) <= there - kept
        assert 0.0 <= turn.away_s <= AWAY_MAX_S
        for one in turn.changes:
            assert one.how in WAYS and kind_of(one.begins) == kind_of(one.ends)
            assert one.begins == one.ends or one.begins not in used, "a new name was never used"
        there = there - set(ends) | {one.begins for one in turn.changes}
        used |= there
        assert Counter(map(kind_of, there)) == sizes


def test_a_seed_gives_the_same_turns_and_another_one_others():
    plan = parse_nodes("prefill=3,decode=5,store=3")

    def drawn(seed):
        return list(islice(turns(plan, survivors(plan, 0.4, seed), 3, seed), 30))

    assert drawn(5) == drawn(5) != drawn(6)
    changes = [one for turn in drawn(5) for one in turn.changes]
    assert {one.how for one in changes} == set(WAYS)
    assert {one.begins == one.ends for one in changes} == {True, False}


def test_no_turns_if_all_survive():
    plan = parse_nodes("prefill=1,decode=1")
    assert list(turns(plan, survivors(plan, 0.1, 1), 3, 1)) == []


# --- growth


@settings(max_examples=50)
@given(st.floats(-5.0, 5.0), st.integers(0, 99))
def test_the_slope_of_noisy_samples_is_that_of_their_line(per_second, seed):
    rng = random.Random(seed)
    points = [(float(at), per_second * at + rng.gauss(0.0, 1.0)) for at in range(60)]
    for number in rng.sample(range(60), 12):  # any 20 % of the samples
        points[number] = (points[number][0], rng.uniform(-1e6, 1e6))
    assert slope(points) == pytest.approx(per_second, abs=0.15)


def test_a_slope_needs_two_times():
    with pytest.raises(ValueError):
        slope([(1.0, 2.0), (1.0, 3.0)])


def test_what_fills_and_then_stays_has_not_grown():
    points = [(float(at), min(at, 40) + at % 2) for at in range(101)]
    assert growth(points, 0.0, 100.0) == pytest.approx(0.0, abs=0.5)


def test_a_leak_has_grown_whatever_came_before():
    points = [(float(at), 500.0 + 0.1 * at + 3.0 * (at % 2)) for at in range(101)]
    assert growth(points, 0.0, 100.0) == pytest.approx(5.0, abs=0.3)


def test_a_late_step_has_grown_although_the_slope_is_zero():
    points = [(float(at), 90.0 if at > 85 else 10.0) for at in range(101)]
    assert slope(points[50:]) < 0.1
    assert growth(points, 0.0, 100.0) == 80.0


def test_few_samples_and_a_late_beginning_are_not_judged():
    points = [(float(at), float(at)) for at in range(101)]
    assert growth(points[60:], 0.0, 100.0) is None
    assert growth([points[0], *points[-LEAST + 1 :]], 0.0, 100.0) is None
    assert growth([points[0], *points[-LEAST:]], 0.0, 100.0) is not None


def soak_with(files, ends_at=()):
    """A soak of 100 s whose only survivor had these numbers of open files, one per second."""
    soak = Soak(None, {"decode-1"}, iter(()), [])
    soak.begun, soak.over, soak.ends_at = 0.0, 100.0, list(ends_at)
    soak.samples["decode-1"] = [
        (float(at), Holding(9 << 20, 9 << 20, 2 * count, count, 4, 2)) for at, count in enumerate(files)
    ]
    soak._last = lambda name: ""
    return soak


@pytest.mark.parametrize(("ends", "wrong"), [(1, True), (40, True), (60, False)])
def test_open_files_may_grow_by_one_per_ten_ended_nodes(ends, wrong):
    soak = soak_with([30 + at // 10 for at in range(101)], [51.0] * ends + [49.0] * 100)
    rows, found = soak.judged(8.0, 4)
    by_metric = {row.metric: row for row in rows}
    assert by_metric["growth of open files"].ours == pytest.approx(5.0, abs=0.5)
    assert by_metric["growth of open files"].limits == {"most": max(4.0, ends // 10)}
    assert by_metric["growth of private memory"].ours == by_metric["growth of threads"].ours == 0.0
    assert by_metric["growth of connections and segments"].limits == {}, "nodes still meet"
    assert [text[:29] for text in found] == (["decode-1: open files grew by "] if wrong else [])


@pytest.mark.parametrize("how", WAYS)
def test_one_file_per_node_that_ended_in_one_way_is_a_leak(how):
    soak = soak_with([30 + int(WAYS[how] * 2 * at) for at in range(101)], [51.0 + at / 2.1 for at in range(100)])
    _, found = soak.judged(8.0, 4)
    assert [text[:29] for text in found] == ["decode-1: open files grew by "]


@pytest.mark.parametrize("count", [0, 2 * LEAST - 2, 2 * LEAST])
def test_a_survivor_that_cannot_be_judged_fails(count):
    soak = soak_with([30] * 101)
    soak.samples["decode-1"] = soak.samples["decode-1"][:: 100 // count] if count else []
    rows, found = soak.judged(8.0, 4)
    judged = count == 2 * LEAST
    assert [row.ours is not None for row in rows] == [judged] * 4
    assert [text.rpartition(":")[0] for text in found] == (
        [] if judged else ["decode-1: too few samples to judge its growth"]
    )


class Unmeasured(Soak):
    """Its samples fail."""

    def _sample(self):
        raise PermissionError("/proc/1/smaps_rollup")


@pytest.mark.parametrize("kind", [Soak, Unmeasured])
async def test_samples_that_end_early_fail(kind, monkeypatch):
    monkeypatch.setattr(Soak, "_progress", lambda self, load: "")
    wrong = []
    soak = kind(OnlyCluster(), set(), iter(()), wrong)
    await soak.run([{}], 0.05, 1e-9, 0.0, 1.0, 1)
    assert wrong == ([] if kind is Soak else ["the samples ended early: PermissionError('/proc/1/smaps_rollup')"])


# --- processes


def test_a_segment_names_its_owner_also_in_another_process():
    with Region.shared("dram", 4096) as region:
        mine = [path for path in segments(os.getpid()) if path.startswith("/memfd:dram of process ")]
        assert mine == [f"/memfd:dram of process {os.getpid()} (deleted)"]
        child = subprocess.Popen(["sleep", "60"], pass_fds=[region.memfd])
        try:
            while mine[0] not in segments(child.pid):  # until it has become sleep
                pass
            assert of_the_dead(segments(child.pid), [os.getpid(), child.pid]) == []
            assert of_the_dead(segments(child.pid), [child.pid]) == mine
        finally:
            child.kill()
            child.wait()
        assert holding(child.pid) is None


def test_what_a_process_holds():
    gc.collect()  # what earlier tests have left
    before = holding(os.getpid())
    with Region.shared("one more", 4 << 20) as region, open(os.devnull) as file:
        region.memory[:] = b"x" * (4 << 20)
        now = holding(os.getpid())
        assert kinds(links(os.getpid()))["/memfd"] >= 1 <= kinds(links(os.getpid()))["file"]
        assert file.fileno() > 0
    assert (now.files, now.segments, now.threads) == (before.files + 2, before.segments + 1, before.threads)
    assert now.pss_bytes >= now.private_bytes > 1 << 20


def test_a_connection_that_only_the_other_side_has_closed():
    before = half_closed(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        assert half_closed(os.getpid()) == before
        theirs.close()
        assert ours.recv(1) == b""
        assert half_closed(os.getpid()) == before + 1
        ours.close()
        assert half_closed(os.getpid()) == before


def test_a_unix_socket_tells_of_its_peer_also_when_that_is_dead(tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        code = (
            "import socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
            "s.connect(sys.argv[1]); time.sleep(60)"
        )
        child = subprocess.Popen([sys.executable, "-c", code, path])
        ours, _ = listener.accept()
        try:
            assert child.pid in unix_peers(os.getpid()) and os.getpid() in unix_peers(child.pid)
            found = left_behind(OnlyCluster(os.getpid(), child.pid), tmp_path)
            assert found["connections to dead nodes"] == []
        finally:
            child.kill()
            child.wait()
        found = left_behind(OnlyCluster(os.getpid()), tmp_path)
        assert found["connections to dead nodes"] == [f"to process {child.pid} in decode-{os.getpid()}"]
        ours.close()
        assert child.pid not in unix_peers(os.getpid())


def test_connections_and_segments_are_not_unconnected_files():
    gc.collect()
    before = holding(os.getpid(), connected())
    one, other = socket.socketpair()
    with (
        one,
        other,
        socket.create_server(("127.0.0.1", 0)) as server,
        Region.shared("more", 4 << 20),
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0],
    ):
        now = holding(os.getpid(), connected())
        assert ours.fileno() > 0
    assert (now.files, now.unconnected) == (before.files + 6, before.unconnected + 1), "one file more: the listener"


class OnlyCluster:
    """A cluster of this process, or of none."""

    def __init__(self, *pids):
        self.living = [type("Node", (), {"pid": pid, "name": f"decode-{pid}"})() for pid in pids]


def test_what_ended_nodes_leave_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = (
        "from net.transfer.common.private_directory import PrivateDirectory; import os, signal; "
        "PrivateDirectory(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    found = left_behind(OnlyCluster(), tmp_path)
    assert found == {
        "segments of dead nodes": [], "connections to dead nodes": [], "directories of dead nodes": [str(tmp_path)],
    }  # fmt: skip
    alive = PrivateDirectory()
    assert left_behind(OnlyCluster(), tmp_path)["directories of dead nodes"] == []
    alive.close()


@contextmanager
def holder(tmp_path, at_sigterm):
    """(a soak, its node: a process with a private directory, which does this at SIGTERM and then exits with 0)"""
    code = (
        "from net.transfer.common.private_directory import PrivateDirectory; import os, signal\n"
        "made = PrivateDirectory()\n"
        f"signal.signal(signal.SIGTERM, lambda *_: ({at_sigterm}, os._exit(0)))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        try:
            process.stdout.readline()
            (tmp_path / "log").touch()
            node = Node("decode-1", "decode", [], tmp_path / "log", tmp_path / "out", process, 0.0)
            yield Soak({"decode-1": node}, set(), iter(()), []), node
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("how", "at_sigterm", "left"), [(TERM, "made.close()", 0), (TERM, "0", 1), (KILL, "made.close()", 0)]
)
async def test_a_node_that_ends_by_itself_removes_its_directory(tmp_path, how, at_sigterm, left):
    with holder(tmp_path, at_sigterm) as (soak, node):
        (path,) = directories(node.pid)
        await soak._end("decode-1", how)
        assert directories(node.pid) == []
    assert soak._wrong == [f"decode-1 left {path} after {how}"] * left
    assert soak.ended == {how: 1}


@pytest.mark.parametrize(("how", "why"), [(TERM, "timed out"), (DRAIN, "does not answer")])
async def test_a_node_that_does_not_end_is_told_of_and_killed(tmp_path, monkeypatch, how, why):
    monkeypatch.setattr(churn, "END_S", 0.1)
    with holder(tmp_path, "signal.pause()") as (soak, node):
        node.url = DEAD
        await soak._end("decode-1", how)
        assert not node.alive
    (text,) = soak._wrong
    assert text.startswith(f"decode-1 did not end after {how}: ") and why in text
    assert not soak.ended


# --- the open load


async def test_arrivals_go_on_while_answers_take_long():
    gate, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def slow(request: web.Request) -> web.StreamResponse:
        arrived.release()
        await gate.wait()
        return await every_third(request)

    async with served(slow, []) as url, OpenLoad(lambda: [url], [{}, {}], 500.0, random.Random(1)) as load:
        for _ in range(20):
            await arrived.acquire()
        assert load.open >= 20 and not any(one.tokens for one in load.streams)
        gate.set()
    assert load.open == 0 and len(load.requests) >= 20
    assert [which for which, _ in load.requests[:4]] == [0, 1, 0, 1]
    assert all(one.tokens == TOKENS and not one.error for one in load.streams)


async def test_a_client_finds_a_living_door_and_insists_where_it_is_refused(monkeypatch):
    monkeypatch.setattr(open_load, "REFUSED_S", 0.0)
    refused, seen = [], []

    async def full_at_first(request: web.Request) -> web.StreamResponse:
        begin = int(request.headers.get("X-Resume-From", 0))
        if begin == 3 and begin not in refused:
            refused.append(begin)
            return web.Response(status=503, text="no node has a place")
        return await every_third(request)

    async with served(full_at_first, seen) as url:
        load = OpenLoad(lambda: [DEAD, url], [{}], 1.0, random.Random(1))
        async with load:
            load._arriving.cancel()
            await load._request(0)
    (one,) = load.streams
    assert one.tokens == TOKENS and not one.error and load.refused == 1
    assert [begin for _, begin in seen] == [0, 3, 6, 9], "it went on behind its tokens after the refusal"


@pytest.mark.parametrize("broken", ["_arrive", "_request"])
async def test_a_load_that_breaks_is_told_of(broken, monkeypatch):
    """Requests that were never sent have no error."""
    failed = asyncio.Event()

    async def fails(*_: object) -> None:
        failed.set()
        raise LookupError("no door")

    monkeypatch.setattr(OpenLoad, broken, fails)
    with pytest.raises(LookupError, match="no door"):
        async with OpenLoad(lambda: [DEAD], [{}], 1000.0, random.Random(1)):
            await failed.wait()
            await asyncio.sleep(0)


async def test_an_error_in_the_stream_is_no_refusal():
    sent = asyncio.Event()

    async def broken(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await send(response, [50])
        await response.write(b'data: {"error": {"message": "503: lost"}}\n\n')
        sent.set()
        return response

    async with served(broken, []) as url, OpenLoad(lambda: [url], [{}], 100.0, random.Random(1)) as load:
        await sent.wait()
    assert load.refused == 0 and any("lost" in one.error for one in load.streams)


def test_the_short_form_has_nodes_of_every_role_that_may_end():
    plan = parse_nodes(churn.QUICK["nodes"])
    kept = survivors(plan, 0.4, 1)
    assert {kind_of(name) for name, _ in plan if name not in kept} == {"prefill", "decode", "store"}
