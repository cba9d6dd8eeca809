"""What a node tells its history: load, role, bytes, tiers, and members that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.node.history_recorder import HistoryRecorder
from engine.observe.history import INTERVAL_S, History

BEGIN = 1_000_000.0


class Gossip:
    """Keeps its listeners."""

    def __init__(self) -> None:
        self.listeners: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda callback: self.listeners.__setitem__(name, callback)


@pytest.fixture
def world() -> SimpleNamespace:
    load = SimpleNamespace(does=frozenset({"prefill"}), draining=False)
    load.record = lambda: SimpleNamespace(running=3, waiting=2)
    usage = {"total": 10, "free": 4, "cached": 5, "held": 1}
    engine = SimpleNamespace(load=load, pool=SimpleNamespace(usage=lambda: usage))
    serving = SimpleNamespace(engine=engine)
    path = {"peer": "b", "transport": "shm", "bytes_read": 7, "bytes_written": 5, "failures": 0, "rails": []}
    gossip = Gossip()
    cluster = SimpleNamespace(gossip=gossip, transfer=SimpleNamespace(snapshot=lambda: [path]))
    stats = {"dram": {"blocks": 3, "capacity": 8}, "ssd": {"blocks": 1, "capacity": 16}}
    share = SimpleNamespace(stats=lambda: stats)
    shapes = {"geometry": SimpleNamespace(pool_bytes=50), "own": SimpleNamespace(block_bytes=100)}
    blocks = SimpleNamespace(**shapes, share=share)
    history = History("a", BEGIN)
    recorder: Any = HistoryRecorder(history, serving, cluster, blocks)  # type: ignore[arg-type]
    return SimpleNamespace(recorder=recorder, history=history, gossip=gossip, serving=serving, blocks=blocks, load=load)


def test_an_interval_has_load_bytes_and_tiers(world):
    world.recorder.look(BEGIN + 1)
    assert world.history.since(0)["intervals"] == [], "the interval still runs"
    world.recorder.look(BEGIN + INTERVAL_S)
    (only,) = world.history.since(0)["intervals"]
    assert (only["running"], only["waiting"]) == (3, 2)
    assert only["rails"] == {"a – b, shared memory": 12}
    assert only["tiers"] == {"kv": (600, 1000), "dram": (150, 400), "ssd": (50, 800)}


def test_a_store_without_a_model_has_tiers_and_no_load(world):
    world.serving.engine = None
    world.recorder.look(BEGIN + INTERVAL_S)
    (only,) = world.history.since(0)["intervals"]
    assert set(only) == {"number", "rails", "tiers"} and set(only["tiers"]) == {"dram", "ssd"}


async def test_members_roles_and_draining_are_marked(world):
    world.recorder.start()
    try:
        tell = world.gossip.listeners
        tell["on_up"](SimpleNamespace(node_id="b"))
        tell["on_suspected"]("b")
        tell["on_down"](SimpleNamespace(node_id="b"), "dead: found by c")
        tell["on_down"](SimpleNamespace(node_id="d"), "left")
        world.recorder.look(BEGIN)
        world.load.draining = True
        world.recorder.look(BEGIN)
    finally:
        await world.recorder.close()
    assert [(mark["kind"], mark["node_id"], mark["text"]) for mark in world.history.since(-1)["marks"]] == [
        ("member", "b", "joined"),
        ("fault", "b", "does not answer"),
        ("fault", "b", "was lost"),
        ("member", "d", "left"),
        ("role", "a", "takes no new requests"),
    ]
