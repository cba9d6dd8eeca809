"""Cold: the blocks of a request whose KV exceeds the arena, and which of them lie where. Pure.

    blocks of the request   0 ................ len(slots)  ....................
    where they lie          slots of the tiers (cold)       the arena (hot)

The request takes its blocks of the arena once, when it gets a seat, and fills them again and again: when it needs room
for new tokens, its oldest hot blocks, which are full, move to slots of the tiers (engine/beyond/lodged.py). If it loses
its seat and its blocks, the cold ones stay; it computes again only what was hot.

A step over many cold blocks takes long, and all requests of a step wait for its end. So its tokens may pass the layers
a few at a time, in several steps with other requests (apart.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cache.block import BlockKey
from cache.pool.policy import Facts
from engine.step.apart import Apart


class PartLost(OSError):
    """Another node does not answer for the blocks that it holds."""


class PartLate(Exception):
    """Another node has not answered about `layer` yet. The step goes on without the request, whose tokens stay before
    the first layer of the step."""

    def __init__(self, layer: int, then: Callable[[Callable[[], object]], None]) -> None:
        """then(call): `call()` when the node has answered, or is lost; in any thread."""
        super().__init__(f"no answer about layer {layer} yet")
        self.layer, self.then = layer, then


Places = np.ndarray[Any, np.dtype[np.int32]]
"""[n], counted in layers of blocks: layer l of block b is at place b * num_layers + l of the arena."""


class Pieces(Protocol):
    """The cold blocks of one step, layer after layer: in the window, in DRAM, and on other nodes."""

    near: Any
    """A tensor: the memory of the DRAM tier [slots * num_layers, planes, num_kv_heads, block_size, head_size]."""

    def ask(self, q: Any, scale: float, soft_cap: float) -> Callable[[], Iterable[Any]]:
        """Ask the nodes that hold blocks for their parts of the next layer; before `layer`. q: a tensor [T, num_heads,
        head_size]. The result waits for them: attention.parts.Part of all rows, one from each node. It raises PartLate,
        and then the same queries may be asked again; or PartLost, as `ask` itself."""

    def layer(self) -> tuple[Places, Iterator[Places]]:
        """The next layer's cold blocks: places in `near`, and pieces of the window: places in the arena, each until the
        next piece is asked for."""


class Lodged(Protocol):
    """The tier's room for one request (engine/beyond/lodged.py). `read` and `store` run in the engine thread, the
    others on the event loop."""

    def read(self, slots: Sequence[int], window: Sequence[int], layers: range) -> AbstractContextManager[Pieces]:
        """Read these layers of these slots through these blocks of the arena. Nothing is written to them any more when
        the context ends."""

    def near_of(self, slots: Sequence[int]) -> Any | None:
        """The memory of the DRAM tier, as Pieces.near, if all of these slots lie there; otherwise None."""

    def store(self, block_id: int, slot: int, key: BlockKey) -> int:
        """Copy a full block of the arena to a slot; returns its checksum."""

    def name(self, key: BlockKey, slot: int, block_checksum: int, facts: Facts) -> None:
        """A slot has the whole block of this key: others may find it."""

    def ran(self, tokens: int, slots: Sequence[int], hot: int, seconds: float) -> None:
        """`tokens` tokens of the request have passed all layers, over the cold blocks in these slots and `hot` blocks
        of the arena."""

    def close(self) -> None:
        """Give all slots back."""


Moved = tuple[int, int, int]
"""A block that got its slot: (place in the request, slot, checksum)."""


@dataclass(eq=False, slots=True)
class Cold(Apart):
    """Changed in the engine thread while a step runs, else on the event loop."""

    hot_blocks: int
    window_blocks: int
    block_size: int
    num_layers: int
    lodged: Lodged | None = None  # None: the tier has no room for it yet
    refused: str = ""  # why the tier has none
    keys: Sequence[BlockKey] = ()  # of its full blocks, as far as the running step needs them
    slots: list[int] = field(default_factory=list)  # of the first blocks, in order
    spare: list[int] = field(default_factory=list)  # for the next ones, the last one first
    hot: list[int] = field(default_factory=list)  # blocks of the arena: those after the cold ones, in order
    free: list[int] = field(default_factory=list)  # blocks of the arena for the next ones
    window: list[int] = field(default_factory=list)  # blocks of the arena to read into
    moved: list[Moved] = field(default_factory=list)  # in the last step
    waits: bool = False  # for another node that is late; until it has answered, no step computes the request
    most_layers: int = 0  # of the next step, because of that; 0: as many as there is time for
    layer_s: dict[bool, float] = field(default_factory=dict)  # of the last step, by whether it was for one token
    ran: tuple[int, Sequence[int], int, float] | None = None  # the last tokens behind all layers, as in Lodged.ran

    @property
    def span(self) -> range:
        return range(self.num_layers)

    @property
    def model_layers(self) -> int:
        return self.num_layers

    @property
    def open(self) -> bool:
        """Whether it has its room in the tier."""
        return self.lodged is not None

    @property
    def arena_blocks(self) -> int:
        """That it takes while it has a seat."""
        return self.hot_blocks + self.window_blocks

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one step."""
        return (self.hot_blocks - 1) * self.block_size

    @property
    def cold_tokens(self) -> int:
        return len(self.slots) * self.block_size

    def lodge(self, lodged: Lodged, slots: Sequence[int], spare: Sequence[int]) -> None:
        """The tier has room: `slots` hold the first blocks already, `spare` are for the next ones, in order."""
        self.lodged, self.slots, self.spare = lodged, list(slots), list(spare)[::-1]

    def seat(self, block_ids: Sequence[int]) -> None:
        """It has these blocks of the arena, `arena_blocks` of them."""
        self.window, self.free = list(block_ids[: self.window_blocks]), list(block_ids[self.window_blocks :])

    def unseat(self) -> None:
        """It has no block of the arena any more."""
        self.window, self.free, self.hot = [], [], []

    def next_layers(self, count: int, seconds: float) -> range:
        """The layers that `count` tokens pass next, in about `seconds`; at least one."""
        layer_s = self.layer_s.get(count == 1)
        most = 1 if layer_s is None else max(1, int(min(self.num_layers, seconds / max(layer_s, 1e-9))))
        most = min(most, self.most_layers or most)
        return self.layers_left[:most]

    def computed(self, count: int, layers: range, seconds: float, hidden: Any) -> None:
        """A step took `count` tokens through these layers; hidden: see `spent`."""
        self.most_layers = 0
        self.layer_s[count == 1] = seconds / len(layers)
        self.spent(seconds, hidden)
        if layers.stop == self.num_layers:
            self.ran = (count, tuple(self.slots), len(self.hot), self.spent_s)

    def late(self, layer: int) -> None:
        """A step ended at that layer, because another node is late. The next one passes those before it; the one after
        that begins there, with the answer. So every second step passes a layer, however often a node is late."""
        self.waits, self.most_layers = True, max(1, layer - self.layer)

    def make_room(self, start: int, count: int) -> int:
        """Room in hot blocks for `count` tokens, at most `chunk_tokens`, from position `start` on, before which all is
        computed. Returns the number of tokens in cold blocks."""
        assert self.lodged is not None
        end = -(-(start + count) // self.block_size)
        while end - len(self.slots) > self.hot_blocks:
            block_id, slot = self.hot[0], self.spare[-1]
            checksum = self.lodged.store(block_id, slot, self.keys[len(self.slots)])
            del self.hot[0], self.spare[-1]
            self.moved.append((len(self.slots), slot, checksum))
            self.slots.append(slot)
            self.free.append(block_id)
        while len(self.slots) + len(self.hot) < end:
            self.hot.append(self.free.pop())
        return self.cold_tokens

    def take_moved(self) -> list[Moved]:
        """The blocks that got their slots since the last call."""
        moved, self.moved = self.moved, []
        return moved

    def close(self) -> None:
        """The request has ended and no step computes it: give the tier's slots back."""
        if self.lodged is not None:
            self.lodged.close()
        self.lodged, self.slots, self.spare, self.moved = None, [], [], []
