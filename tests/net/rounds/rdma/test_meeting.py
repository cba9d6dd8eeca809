"""How two processes agree on RDMA or TCP: both ends over a connection, with mirrors that need no card."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from net import bodies
from net.bodies import BodyError
from net.errors import PeerLost
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.rdma import meeting
from net.rounds.rdma.mirror import Side
from net.rounds.rdma.offer import Offer, devices, why_not
from net.rounds.rdma.ways import Ways
from net.transfer.common.topology import Overrides
from net.transfer.common.transport import Unusable
from net.transfer.rdma import verbs
from net.transfer.rdma.endpoint import Endpoint
from tests.net.rounds.test_remote_desk import connected

LAYOUT = Layout(most_rows=4, hidden=16, top_k=2, dtype="float32")
SIDE = Side(Endpoint(7, 8, "00" * 16, 0, 5, 16, 16), 4096, 8192, 99)


class FakeMirror:
    """`fails`: the step that does."""

    def __init__(self, fails: str = "") -> None:
        self.side, self.fails, self.discarded, self.there = SIDE, fails, False, None

    def connect(self, there: Side) -> None:
        self._step("connect")
        self.there = there

    def probe(self, at: int) -> None:
        self._step("probe")

    def _step(self, name: str) -> None:
        if self.fails == name:
            raise Unusable(f"{name} fails")

    def discard(self) -> None:
        self.discarded = True


@pytest.fixture
def wires() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    near, far = connected(None, None)
    assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
    yield near, far
    near.close()
    far.close()


def met(wires, monkeypatch, asking: Any, answering: Any) -> list[Any]:
    """What both say at the end: (asking, answering)."""
    near, far = wires
    monkeypatch.setattr(meeting, "opened", lambda *given: asking)
    far.send({"ready": True} | meeting.told(answering))
    found: list[Any] = [None, None]

    def ask() -> None:
        found[0] = meeting.ask(near, near.frame().header, "card", None, LAYOUT)

    thread = threading.Thread(target=ask)
    thread.start()
    found[1] = meeting.answer(far, answering)
    thread.join()
    return found


def test_both_write_when_both_can(wires, monkeypatch):
    asking, answering = FakeMirror(), FakeMirror()
    assert met(wires, monkeypatch, asking, answering) == [asking, answering]
    assert asking.there == answering.there == SIDE and not asking.discarded and not answering.discarded


@pytest.mark.parametrize("step", ["open", "connect", "probe"])
@pytest.mark.parametrize("which", ["asking", "answering"])
def test_if_a_step_fails_both_hear_why_and_nothing_stays_open(wires, monkeypatch, which, step):
    good, why = FakeMirror(), f"{step} fails"
    bad = why if step == "open" else FakeMirror(step)
    pair = (bad, good) if which == "asking" else (good, bad)
    assert met(wires, monkeypatch, *pair) == [why, why]
    used = [one for one in pair if isinstance(one, FakeMirror)]
    if which == "answering" and step == "open":
        used.remove(good)  # the asking side has not opened its own
    assert all(one.discarded for one in used)


GOOD = bodies.encode(SIDE)


@pytest.mark.parametrize(
    "side",
    [
        *(None, 5, [], {}, GOOD | {"more": 1}, GOOD | {"key": 1 << 32}, GOOD | {"key": -1}, GOOD | {"key": "9"}),
        *(GOOD | {"address": -1}, GOOD | {"address": (1 << 64) - 8192}, GOOD | {"nbytes": 0}, GOOD | {"nbytes": True}),
        *(GOOD | {"endpoint": None}, GOOD | {"endpoint": GOOD["endpoint"] | {"psn": 1 << 24}}),
        GOOD | {"endpoint": GOOD["endpoint"] | {"gid": "0"}},
    ],
)
def test_a_description_that_is_none_ends_the_connection(wires, monkeypatch, side):
    with pytest.raises(BodyError):
        bodies.decode(Side, side)
    near, far = wires
    mirror = FakeMirror()
    far.send({"side": side})
    with pytest.raises(PeerLost, match="its description of a queue pair is none"):
        meeting.answer(near, mirror)  # type: ignore[arg-type]
    assert mirror.discarded


@pytest.mark.parametrize("said", [{"reached": True}, {"a": 1}, {}])
def test_something_else_ends_the_connection(wires, said):
    near, far = wires
    mirror = FakeMirror()
    far.send(said)
    with pytest.raises(PeerLost, match="it was to say 'side' of RDMA"):
        meeting.answer(near, mirror)  # type: ignore[arg-type]
    assert mirror.discarded


def test_a_side_survives_its_way():
    assert bodies.decode(Side, bodies.encode(SIDE)) == SIDE
    assert bodies.decode(Side, bodies.encode(replace(SIDE, address=(1 << 64) - 8193))).address == (1 << 64) - 8193


def test_ranks_take_the_shared_rails_in_turn():
    node, rank = Offer({"a0": 0, "a1": 1, "a2": 2}), Offer({"b1": 1, "b2": 2, "b3": 3})
    assert why_not(node, rank) == ""
    assert [devices(node, rank, number) for number in range(3)] == [("a1", "b1"), ("a2", "b2"), ("a1", "b1")]
    assert "share no rail number" in why_not(node, Offer({"b3": 3}))
    assert why_not(Offer(refused="none here"), rank) == "the node: none here"
    assert why_not(node, Offer(refused="none here")) == "the rank: none here"


def test_what_a_process_offers(monkeypatch, tmp_path):
    assert Ways("tcp").offer() == Offer(refused="--transport tcp")
    assert Ways("shm").offer() == Offer(refused="--transport shm")
    assert "--rdma-plaintext" in Ways("auto", sealed_only=True).offer().refused
    monkeypatch.setattr(verbs, "SYSFS", tmp_path / "nothing")
    verbs.verbs.cache_clear()
    assert "no RDMA device" in Ways("auto").offer().refused and not Ways("auto").offer().unusable
    told = Ways("rdma").offer().unusable
    assert told.startswith("--transport rdma: this machine has no RDMA device") and "\n" not in told
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "some" / name).mkdir(parents=True)
    monkeypatch.setattr(verbs, "SYSFS", tmp_path / "some")
    monkeypatch.setattr(verbs, "Verbs", lambda: None)
    assert Ways("auto").offer() == Offer({"mlx5_0": 0, "mlx5_1": 1})
    assert Ways("rdma", ["mlx5_1"]).offer() == Offer({"mlx5_1": 0}, only=True)
    assert Ways("auto", ["mlx5_1"], overrides=Overrides({"mlx5_1": 4})).offer() == Offer({"mlx5_1": 4})
    assert "no RDMA device 'mlx5_7', only mlx5_0, mlx5_1" in Ways("auto", ["mlx5_7"]).offer().refused
    verbs.verbs.cache_clear()
