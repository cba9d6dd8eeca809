"""The KV that nodes with parts of one prompt's tokens send to one another, layer by layer (context parallelism).

The event loop adds what arrives. The engine thread takes it for the layer that it is about to compute, and waits for
what is still on its way: only for chunks that have begun on their nodes (`begun_before`), which go before all other
parts there. If other prompts come to the node meanwhile, the step ends, and a later one goes on (engine/step/apart.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from engine.step.part import Stripes
from engine.step.step import ScheduledRow

if TYPE_CHECKING:
    from torch import Tensor

Send = Callable[[int, ScheduledRow, "Tensor | None"], None]
"""(layer, row, that layer of the row's blocks as bytes): it has been computed; send it to the nodes that need it. None:
no node does. Runs on the event loop."""


class ExchangeEnded(Exception):
    """The request has ended; nothing more arrives."""


class Exchange:
    """Of one request on one node."""

    def __init__(self, part: Stripes, send: Send) -> None:
        """part: after its start."""
        self.give = send
        self.waited_s = 0.0  # of the engine thread, for the other nodes
        others = [node for node in range(part.nodes) if node != part.index]
        self._chunks = {node: part.chunks_of(node) for node in others}
        self._last_begin = {node: chunks[-1][0] for node, chunks in self._chunks.items()}
        first = {node: chunks[0][0] for node, chunks in self._chunks.items()}
        self._arrived = [dict(first) for _ in range(part.num_layers)]  # of each layer: node -> its first missing token
        self._pieces: list[list[tuple[int, Tensor]]] = [[] for _ in range(part.num_layers)]
        self._num_tokens = part.borders[-1]
        self._ended = False
        self._changed = threading.Condition()

    # --- on the event loop

    def add(self, node: int, layer: int, start: int, count: int, blocks: Tensor) -> None:
        """`layer` of the blocks with the tokens [start, start + count), which `node` has computed. Raises ValueError if
        that is not what it computes next."""
        if node not in self._chunks or not 0 <= layer < len(self._arrived) or self._arrived[layer][node] != start:
            raise ValueError(f"layer {layer} of tokens {start}+{count} is not what node {node} computes next")
        chunk = next(((begin, end) for begin, end in self._chunks[node] if begin <= start < end), None)
        if chunk is None or count <= 0 or start + count > chunk[1]:
            raise ValueError(f"tokens {start}+{count} are no part of a chunk of node {node}")
        following = start + count
        if following == chunk[1]:
            following = next((begin for begin, _ in self._chunks[node] if begin >= chunk[1]), self._num_tokens)
        with self._changed:
            self._arrived[layer][node] = following
            self._pieces[layer].append((start, blocks))
            self._changed.notify_all()

    def begun_before(self, token: int) -> bool:
        """Whether the other nodes have begun to compute all their tokens before `token`: the first layer is here."""
        return self._here(0, token)

    def look_again(self) -> None:
        """The engine thread may have to wait no longer: see `take`."""
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """The request has ended: the engine thread waits no longer."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # --- in the engine thread

    def needed_behind(self, token: int) -> bool:
        """Whether another node has a chunk that begins at `token` or later."""
        return any(begin >= token for begin in self._last_begin.values())

    def needs(self, node: int, token: int) -> bool:
        """Whether that node has a chunk that begins at `token` or later."""
        return self._last_begin.get(node, -1) >= token

    def take(
        self, layer: int, token: int, left_s: Callable[[], float] = lambda: inf
    ) -> list[tuple[int, Tensor]] | None:
        """Wait until this layer of all tokens before `token` is here. Returns what has arrived since the last call:
        (first token, blocks). left_s(): how many seconds it may still wait, asked again after `look_again`; None when
        they are over. Raises ExchangeEnded."""
        with self._changed:
            began = time.monotonic()
            while not self._ended and not self._here(layer, token) and (left := left_s()) > 0:
                self._changed.wait(None if left == inf else left)
                self.waited_s += time.monotonic() - began
                began = time.monotonic()
            if self._ended:
                raise ExchangeEnded
            if not self._here(layer, token):
                return None
            pieces = self._pieces[layer]
            self._pieces[layer] = [piece for piece in pieces if piece[0] >= token]
            return [piece for piece in pieces if piece[0] < token]

    def _here(self, layer: int, token: int) -> bool:
        return all(missing >= token for missing in self._arrived[layer].values())
