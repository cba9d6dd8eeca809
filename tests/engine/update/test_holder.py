"""The engine of one node prepares, switches and drops; what runs keeps its weights. Nothing is read here."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine.checkpoint.named_weights import UnfitTensors
from engine.config.config import Config
from engine.core.emissions import Emission
from engine.loading.new_weights import NewWeights
from engine.model.model_error import ModelError
from engine.update import holder as holder_module
from engine.update.holder import WeightHolder
from net.errors import RemoteError
from tests.engine.core.test_worker import Counting, make, request, until

NEW, OTHER = b"n" * 16, b"o" * 16


class Model(Counting):
    """A runner whose model tells when it gives its memory back."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.model = SimpleNamespace(close=self._close)

    def _close(self) -> None:
        self.closed = True


class World:
    """A worker, its holder, and what the tensors under a prefix are: a content, or the error with which they are
    read."""

    def __init__(self, monkeypatch: Any, config: Config) -> None:
        self.worker, self.first = make()
        self.first.model = SimpleNamespace(close=lambda: None)  # type: ignore[attr-defined]
        self.found: dict[str, Any] = {"new/": NEW, "other/": OTHER}
        self.made: list[Model] = []
        self.gate = threading.Event()
        self.gate.set()
        self.got: list[Emission] = []
        self.holder = WeightHolder(config, SimpleNamespace(config=None), self.worker, SimpleNamespace())  # type: ignore[arg-type]
        monkeypatch.setattr(holder_module, "NamedTensors", lambda store, tenant: None)
        monkeypatch.setattr(holder_module.NamedWeights, "find", lambda tensors, calls, prefix, config: prefix)
        monkeypatch.setattr(holder_module, "load_new_weights", self._load)

    def _load(self, config: Config, source: Any, prefix: Any, running: Any) -> NewWeights:
        assert self.gate.wait(5)
        if isinstance(found := self.found[prefix], Exception):
            raise found
        self.made.append(Model())
        return NewWeights(found, self.made[-1], 10, 0.5, 1.0)  # type: ignore[arg-type]

    async def prepare(self, prefix: str, name: str = "u", lease_s: float = 60.0) -> Any:
        return await self.holder.prepare(name, prefix, "default", lease_s)


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(holder_module, "UNUSED_POLL_S", 0.005)
    made = World(monkeypatch, Config(device="cpu"))
    made.worker.start(made.got.extend)
    yield made
    await made.holder.close()
    await made.worker.close()


def refused(code: str, text: str | None = None) -> Any:
    return pytest.raises(RemoteError, match=text, check=lambda error: error.code == code)


async def test_old_weights_are_dropped_when_nothing_uses_them_here_or_elsewhere(world):
    world.first.gate.clear()
    world.worker.add(request("old"))
    await until(lambda: world.first.begun)
    assert (await world.prepare("new/")).key == NEW
    assert world.holder.held == ["", NEW.hex()] and world.holder.switch(NEW)
    world.holder.release([b""])
    await asyncio.sleep(0.03)
    assert world.holder.held == [NEW.hex(), ""], "a client's request on another node may need them"
    world.holder.release([])
    await asyncio.sleep(0.03)
    assert world.holder.held == [NEW.hex(), ""], "a request here needs them"
    world.first.gate.set()
    await until(lambda: world.holder.held == [NEW.hex()])
    assert len(world.got) == 4 and all(one.error is None for one in world.got)


async def test_weights_that_no_switch_uses_are_given_back(world):
    for end in (
        lambda: world.holder.abandon("u"),  # its coordinator says so
        lambda: world.holder.switch(b""),  # another replacement came first
        lambda: None,  # its coordinator is gone: the lease expires
    ):
        await world.prepare("new/", lease_s=0.05)
        end()
        await until(lambda: world.made[-1].closed)
        assert world.holder.held == [""] and not world.holder.switch(NEW)


async def test_what_is_abandoned_while_it_is_read_is_never_held(world):
    world.gate.clear()
    reading = asyncio.create_task(world.prepare("new/"))
    await asyncio.sleep(0.01)
    with refused("busy"):
        await world.prepare("other/", name="second")
    world.holder.abandon("second")
    world.holder.abandon("u")
    world.gate.set()
    with refused("abandoned"):
        await reading
    assert world.holder.held == [""] and (await world.prepare("other/")).key == OTHER


async def test_a_content_that_is_there_is_not_held_twice(world):
    """Back to weights that requests still use, and the same weights once more."""
    await world.prepare("new/")
    assert world.holder.switch(NEW)
    world.found["old/"] = b""
    await world.prepare("old/")
    assert world.made[-1].closed and world.holder.held == [NEW.hex(), ""]
    world.holder.release([])
    await asyncio.sleep(0.03)
    assert world.holder.switch(b"") and world.worker.runner is world.first, "a replacement brings them back"
    await world.prepare("old/")
    world.holder.abandon("u")
    await asyncio.sleep(0.03)
    assert world.holder.held == ["", NEW.hex()] and not world.made[0].closed


@pytest.mark.parametrize(
    ("error", "code"), [(UnfitTensors("1 of 3 is missing"), "tensors"), (ModelError("no memory"), "failed")]
)
async def test_why_they_cannot_be_prepared(world, error, code):
    world.found["new/"] = error
    with refused(code, str(error)):
        await world.prepare("new/")
    assert world.holder.held == [""] and (await world.prepare("other/")).key == OTHER


@pytest.mark.parametrize(
    ("flags", "text"),
    [({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"), ({"device": "cuda"}, "--device cuda")],
)
async def test_nodes_that_cannot_replace_weights_say_so_in_one_line(monkeypatch, flags, text):
    world = World(monkeypatch, Config(**({"device": "cpu"} | flags)))
    with refused("unsupported", text) as told:
        await world.prepare("new/")
    assert "\n" not in str(told.value)
    await world.worker.close()
