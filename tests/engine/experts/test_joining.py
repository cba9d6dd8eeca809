"""How ranks of other hosts join, without processes: large placements, strangers, and what goes wrong at the door."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config.config import Config
from engine.config.net_options import open_expert_door
from engine.experts import loading, rank_command, remote_ranks, remote_worker
from engine.experts.joining import VERSION, Joining, Welcome
from engine.experts.placing.placement import first_placement
from engine.experts.plan import Duty, Plan
from engine.experts.pulling import Sources, checksum
from engine.experts.remote_ranks import RemoteRanks
from engine.experts.remote_worker import RemoteWorker
from engine.experts.share import Share
from engine.experts.work import COMMIT, TAKE
from engine.model.model_error import ModelError
from net import bodies
from net.channel.wire import FrameError
from net.errors import PeerLost
from net.rounds.desk import new_bell
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.outpost import Outpost
from net.rounds.rdma import meeting
from net.rounds.rdma.offer import Offer
from net.rounds.rdma.ways import Ways
from net.transfer.common.memory import Region
from tests.engine.experts.test_ranks import wait_for

LAYOUT = Layout(most_rows=8, hidden=16, top_k=2, dtype="float32")
JOIN = {"join": bodies.encode(Joining(VERSION, "a process"))}


def plan_of(layers: int, experts: int, ranks: int, copies: int, remote: int) -> Plan:
    return Plan(tuple(range(layers)), experts, ranks, copies * experts // ranks, 16, 8, "silu", LAYOUT, remote)


def test_a_rank_joins_a_node_whose_placement_is_as_long_as_that_of_deepseek_v3():
    """58 layers of 256 experts, two of each on 16 ranks."""
    plan, placement = plan_of(58, 256, 16, 2, remote=15), first_placement(58, 256, 16, 512, 2)
    welcome = bodies.encode(Welcome(3, "a model", plan, placement))
    assert len(json.dumps(welcome)) > 100_000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = RemoteWorker(listener.getsockname(), None, None)
        errors: list[BaseException] = []

        def serve() -> None:
            try:
                worker._serve()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        wire = FrameSocket.accepted(listener.accept()[0], None, 60.0)
        try:
            assert bodies.decode(Joining, wire.frame().header["join"]).rank == -1
            wire.send({"welcome": welcome})
            expert, handed = memoryview(bytes(4 * plan.expert_elements)), 0
            while "ready" not in (header := wire.frame().header):
                if "want" in header:
                    layer, slot = header["want"]
                    told = checksum("a model", layer, placement.layers[layer][3][slot], [expert])
                    wire.send({"expert": header["want"], "sum": told}, [expert])
                    handed += 1
            assert handed == 58 * plan.slots
        finally:
            wire.close()
            thread.join(60)
    assert not errors and worker._held is not None and worker._held.rank == 3


def test_weights_that_do_not_fit_are_told_to_the_node(monkeypatch):
    """A checkpoint whose shapes are others raises ValueError, as on the node's host."""

    def fill(*given: Any, **named: Any) -> None:
        raise ValueError("the shape is another one")

    monkeypatch.setattr(remote_worker, "fill", fill)
    plan = plan_of(1, 4, 2, 1, remote=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source: Any = SimpleNamespace(fingerprint="a model")
        worker = RemoteWorker(listener.getsockname(), source, None)
        told: list[str] = []

        def serve() -> None:
            with pytest.raises(ModelError, match="another one"):
                worker._serve()
            told.append("raised")

        thread = threading.Thread(target=serve)
        thread.start()
        wire = FrameSocket.accepted(listener.accept()[0], None, 60.0)
        try:
            wire.frame()
            wire.send({"welcome": bodies.encode(Welcome(1, "a model", plan, first_placement(1, 4, 2, 4, 1)))})
            assert wire.frame().header == {"failed": "the shape is another one"}
        finally:
            wire.close()
            thread.join(60)
    assert told == ["raised"]


def test_the_node_hears_of_the_loading_only_when_it_progresses(monkeypatch):
    """A process that hangs in it loses its place after LOADING_S."""
    monkeypatch.setattr(loading, "TELL_S", 0.0)
    goes_on = threading.Event()

    def fill(*given: Any, progress: Callable[..., None]) -> None:
        for _ in range(3):
            progress(1, 3)
        goes_on.wait(60)

    monkeypatch.setattr(remote_worker, "fill", fill)
    plan, source = plan_of(1, 4, 2, 1, remote=1), SimpleNamespace(fingerprint="a model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = RemoteWorker(listener.getsockname(), source, None)  # type: ignore[arg-type]
        thread = threading.Thread(target=worker._serve)
        thread.start()
        wire = FrameSocket.accepted(listener.accept()[0], None, 60.0)
        try:
            wire.frame()
            wire.send({"welcome": bodies.encode(Welcome(1, "a model", plan, first_placement(1, 4, 2, 4, 1)))})
            assert [wire.frame().header for _ in range(3)] == [{"loading": True}] * 3
            wire.await_for(0.5)
            with pytest.raises(PeerLost, match="nothing came for"):
                wire.frame()
            goes_on.set()
            wire.await_for(60.0)
            assert wire.frame().header == {"ready": True}
        finally:
            goes_on.set()
            wire.close()
            thread.join(60)


@pytest.mark.parametrize("only", [False, True])
def test_a_rank_whose_device_cannot_be_opened_says_so(monkeypatch, only):
    """The node has chosen one of those that it offered."""
    monkeypatch.setattr(meeting, "opened", lambda *given: "RDMA device mlx5_0: no address")
    monkeypatch.setattr(Ways, "offer", lambda self: Offer({"mlx5_0": 0}))
    plan = plan_of(1, 4, 2, 1, remote=1)
    welcome = Welcome(1, "a model", plan, first_placement(1, 4, 2, 4, 1), device="mlx5_0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = FrameSocket.dial(listener.getsockname(), None, 60.0)
        near = FrameSocket.accepted(listener.accept()[0], None, 60.0)
        try:
            if only:
                with pytest.raises(PeerLost, match="--transport rdma: RDMA device mlx5_0: no address"):
                    remote_worker.settle(far, welcome, Ways("rdma"))
            else:
                outpost, way = remote_worker.settle(far, welcome, Ways())
                assert type(outpost) is Outpost and way == "TCP; no RDMA: RDMA device mlx5_0: no address"
            ready = near.frame().header
            assert ready == {"ready": True, "tcp": "RDMA device mlx5_0: no address"}
            assert meeting.ask(near, ready, "mlx5_0", None, plan.layout) == "RDMA device mlx5_0: no address"
        finally:
            near.close()
            far.close()


def test_a_rank_opens_only_a_device_that_it_offered(monkeypatch):
    monkeypatch.setattr(Ways, "offer", lambda self: Offer({"mlx5_1": 0}))
    welcome = Welcome(1, "a model", plan_of(1, 4, 2, 1, remote=1), first_placement(1, 4, 2, 4, 1), device="mlx5_0")
    with pytest.raises(PeerLost, match="mlx5_0, which was not offered"):
        remote_worker.settle(cast(FrameSocket, None), welcome, Ways())


@pytest.fixture
def door() -> Iterator[Callable[..., RemoteRanks]]:
    """The node's end, for one rank elsewhere; its group has not begun."""
    made: list[RemoteRanks] = []
    bell = new_bell("bell")

    def opened(host: str = "127.0.0.1") -> RemoteRanks:
        config = Config(model="a model", host=host, expert_parallel_size=2, expert_remote_ranks=1)
        source: Any = SimpleNamespace(fingerprint="a model")
        first = Duty(0, plan_of(1, 4, 2, 1, remote=1), first_placement(1, 4, 2, 4, 1))
        made.append(RemoteRanks(config, Sources(first.plan, source), {}, first, bell, open_expert_door(config)))
        return made[-1]

    yield opened
    for one in made:
        one.close()
    bell.close()


class Broken:
    """A listener whose first tries to accept fail, as when the process has too many open files."""

    def __init__(self, listener: socket.socket, failures: int) -> None:
        self._listener, self.left = listener, failures

    def accept(self) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(24, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_ranks_join_after_an_error_at_the_door(door, monkeypatch, caplog):
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *given, **named: Broken(create(*given, **named), 3))
    monkeypatch.setattr(remote_ranks, "AGAIN_S", 0.01)
    made = door()
    FrameSocket.dial(made.address, None, 20.0).close()
    wait_for(lambda: "is refused" in caplog.text)
    assert caplog.text.count("Too many open files; trying again") == 3
    made.close()
    assert not made._threads[0].is_alive()


def test_those_that_say_nothing_keep_no_place_and_those_that_wait_do(door, monkeypatch, caplog):
    """All places of strangers are taken by connections that send a byte now and then; they lose them."""
    monkeypatch.setattr(remote_ranks, "MOST_GUESTS", 1)
    monkeypatch.setattr(remote_ranks, "JOIN_S", 0.5)
    made = door()
    waiting = FrameSocket.dial(made.address, None, 20.0)
    waiting.send(JOIN)
    with socket.create_connection(made.address) as stranger:
        stop = threading.Event()

        def drip() -> None:
            for byte in b"MOON":
                stranger.sendall(bytes([byte]))
                if stop.wait(0.1):
                    return
            stop.wait(30)

        thread = threading.Thread(target=drip)
        thread.start()
        wait_for(lambda: "did not say in time" in caplog.text)
        stop.set()
        thread.join()
    wait_for(lambda: made._waiting._value == 1)  # the place of the one that waits is still its own
    time.sleep(2 * remote_ranks.JOIN_S)
    with pytest.raises(BlockingIOError):  # nobody has ended it
        waiting._sock.recv(1, socket.MSG_DONTWAIT)
    assert made._waiting._value == 1
    placement, group = first_placement(1, 4, 2, 4, 1), SimpleNamespace()
    group.restart_from = lambda rank: (placement, ())
    made.begin(group, [])  # type: ignore[arg-type]
    assert bodies.decode(Welcome, waiting.frame().header["welcome"]).rank == 1
    wait_for(lambda: made._waiting._value == 2)  # it loads: no place for strangers any more
    assert 1 in made._guests
    waiting.close()
    wait_for(lambda: not made._guests)
    assert made._waiting._value == 2


def test_ranks_that_may_be_added_get_processes_after_all_others():
    """Also if a process asks for the added one, which it was."""
    bell = new_bell("bell")
    plan = replace(plan_of(1, 4, 2, 1, remote=1), ranks=3, remote=2, added=1)
    config = Config(
        model="m", host="127.0.0.1", expert_parallel_size=2, expert_remote_ranks=1, max_expert_parallel_size=3
    )
    source: Any = SimpleNamespace(fingerprint="a model")
    first = Duty(0, plan, first_placement(1, 4, 2, 4, 1, added=1))
    made = RemoteRanks(config, Sources(plan, source), {}, first, bell, open_expert_door(config))
    try:
        assert list(made.absent()) == [1] and made.hosts() == ["of rank 1", "of rank 2"]
        wire: Any = SimpleNamespace(end=lambda: None)
        found = [
            made._take_place(wire, Joining(VERSION, name, rank=2), host)
            for name, host in (("a", "10.0.0.2"), ("b", None), ("c", None))
        ]
        assert found == [1, 2, None] and made.hosts() == ["10.0.0.2", None]
        made._guests.clear()
    finally:
        made.close()
        bell.close()


def test_a_process_that_is_back_before_its_end_was_noticed_gets_its_own_place():
    """And not another one that is free: its experts would have nobody."""
    bell = new_bell("bell")
    plan = replace(plan_of(1, 4, 2, 1, remote=1), ranks=3, remote=2, added=1)
    first = Duty(0, plan, first_placement(1, 4, 2, 4, 1, added=1))
    config = Config(model="m", host="127.0.0.1", expert_parallel_size=2, expert_remote_ranks=1)
    source: Any = SimpleNamespace(fingerprint="a model")
    made = RemoteRanks(config, Sources(plan, source), {}, first, bell, open_expert_door(config))
    ended: list[str] = []
    wires: Any = [SimpleNamespace(end=lambda name=name: ended.append(name)) for name in ("old", "new")]
    try:
        assert made._take_place(wires[0], Joining(VERSION, "a"), "10.0.0.2") == 1
        assert made._take_place(wires[1], Joining(VERSION, "a", rank=1), "10.0.0.2") is None and ended == ["old"]
        made._guests.clear()
        assert made._take_place(wires[1], Joining(VERSION, "a", rank=1), "10.0.0.2") == 1
        made._guests.clear()
    finally:
        made.close()
        bell.close()


def test_a_share_is_kept_if_the_same_experts_are_asked_for(monkeypatch):
    """Other ranks may have come and gone since it was filled."""
    filled: list[int] = []
    monkeypatch.setattr(remote_worker, "fill", lambda duty, *given, **named: filled.append(duty.rank))
    source: Any = SimpleNamespace(fingerprint="a model")
    worker = RemoteWorker(("127.0.0.1", 1), source, None)
    plan = replace(plan_of(2, 4, 2, 1, remote=1), ranks=4, remote=3, added=2)
    placement = first_placement(2, 4, 2, 4, 1, added=2).with_rank(2, [(0, 1), (2, 3)])
    wire: Any = None
    share = worker._filled(wire, Welcome(2, "a model", plan, placement))
    changed = placement.with_rank(3, [(0, 1), (2, 3)])
    assert worker._filled(wire, Welcome(2, "a model", plan, changed)) is share
    assert worker._filled(wire, Welcome(3, "a model", plan, changed)) is share
    assert worker._held is not None and worker._held.rank == 3 and filled == [2]
    other = placement.with_rank(2, [(0, 1), (3, 2)])
    worker._note([TAKE, 1, 0, 0, 0, 1, 1, 0])  # of a move that ended before all had their experts
    worker._note([TAKE, 1, 0, 0, 0, 3, 1, 0])
    worker._note([TAKE, 1, 0, 0, 1, 2, 0, 0])
    assert worker._filled(wire, Welcome(2, "a model", plan, placement)) is share
    worker._note([COMMIT, 1, 0, 0, 1, 2, 0, 0])
    assert worker._filled(wire, Welcome(2, "a model", plan, other)) is share and filled == [2]
    assert worker._filled(wire, Welcome(2, "a model", plan, placement)) is not share and filled == [2, 2]


@pytest.mark.parametrize(
    ("head", "more"),
    [
        ([TAKE, 2, 0, 0, 0, 0, 1], 0),  # no such layer
        ([TAKE, 0, 0, 0, 2, 0, 1], 0),  # no such slot
        ([TAKE, 0, 0, 0, 0, 4, 1], 0),  # no such expert
        ([TAKE, 0, 0, 0, -1, 0, 1], 0),
        ([COMMIT, 0, 0, 0], 0),
        ([TAKE, 0, 0, 0, 0, 0, 1], 1),  # a byte too many
    ],
)
def test_bytes_that_are_no_expert_of_the_rank_are_refused(head, more):
    plan = plan_of(2, 4, 2, 1, remote=1)
    share = Share(Region.private("share", plan.share_bytes), plan)
    worker, nbytes = RemoteWorker(("127.0.0.1", 1), None, None), 4 * plan.expert_elements
    with pytest.raises(FrameError, match="are no expert of this rank"):
        worker._take(plan, share, head, nbytes + more)
    assert sum(map(len, worker._take(plan, share, [TAKE, 1, 0, 0, 1, 3, 1], nbytes))) == nbytes


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ranks_join_over_ipv6(door, caplog):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on the loopback")
    made = door("::1")
    assert made.where == f"[::1]:{made.address[1]}"
    FrameSocket.dial(made.address, None, 20.0).close()
    wait_for(lambda: "is refused" in caplog.text)


@pytest.mark.parametrize("address", ["host:65536", "host:0", "host:" + "9" * 5000, "host:x", ":9100", "9100"])
def test_an_address_that_is_none_is_told_in_one_line(address, capsys):
    assert rank_command.main(["--join", address]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "is not HOST:PORT" in told
