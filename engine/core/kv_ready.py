"""Decides which bytes of a prompt's KV may be sent to the decode node, and when. Pure.

The unit of overlap (`--kv-overlap`), from the finest to none:

    layer   sends a layer of a chunk as soon as its attention is done (Mooncake, FAST'25, section 4.2)
    chunk   sends whole blocks as soon as all layers of the chunk are done
    none    sends everything after the prompt's last step, without overlap
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.block import BlockGeometry
from cache.layer_groups import GONE

KV_REGION = "kv"
"""The name of an engine node's KV arena in transfers."""

Tables = Sequence[Sequence[int]]
"""The blocks of each group."""

OVERLAPS = ("layer", "chunk", "none")


@dataclass(frozen=True, slots=True)
class KvTarget:
    """The destination of a prompt's KV: blocks reserved on the decode node."""

    node: str
    region: str
    block_ids: Sequence[int]  # one per block of the prompt
    first_missing: int  # number of leading blocks that the decode node already has
    epoch: str  # of the decode node's hold on the prefill node: see TransferEngine.epoch_of
    others: Sequence[Sequence[int]] = ()  # the same for each further group; GONE = not needed there
    epochs: Sequence[str] = ()  # the same for each node of a group, if several nodes compute the prompt
    dtype: str = ""  # of that node's blocks; "": they are like those of the prefill node
    block_size: int = 0
    prefills: bool = False  # whether that node computes prompts too


class Piece(NamedTuple):
    """Contiguous bytes of one block, with their offsets in the arenas of both nodes."""

    block_id: int  # here
    local: int
    remote: int
    nbytes: int
    tokens: int  # tokens of the block with KV; the bytes after them do not belong to the prompt


class KvReady:
    """Converts the event 'layer l of tokens [start, end) is computed' to the pieces that it completes.

    A block that a chunk leaves half full is handed out again when the next chunk has filled it.
    """

    def __init__(
        self, geometry: BlockGeometry, target: KvTarget, num_tokens: int, overlap: str, layers: range | None = None
    ) -> None:
        """num_tokens: length of the prompt; when the last token is computed, all pieces have been handed out. layers:
        those that this node computes and hands out; None = all."""
        if overlap not in OVERLAPS:
            raise ValueError(f"--kv-overlap must be one of {', '.join(OVERLAPS)}, not {overlap!r}")
        self._geometry = geometry
        self._target = target
        self._num_tokens = num_tokens
        self._overlap = overlap
        self._layers = range(geometry.model_layers) if layers is None else layers
        whole = 0, geometry.block_bytes
        some = self._layers[0] * geometry.layer_bytes, len(self._layers) * geometry.layer_bytes
        self._span = whole if layers is None else some  # (offset, bytes) of these layers in a block
        self._complete: set[tuple[int, int]] = set()  # (group, index) of blocks handed out full, with all these layers
        self._there = [target.block_ids, *target.others]

    def leave_out(self, blocks: Iterable[int], end: int) -> None:
        """Other nodes hand out these blocks of the prompt, by their index, and this one computes nothing behind token
        `end`. Call it before the first `layer_done`."""
        self._complete.update((group, index) for group in range(len(self._there)) for index in blocks)
        self._num_tokens = end

    @property
    def at_end(self) -> bool:
        """Whether pieces must wait for the end of the last step, not only for the end of its last layer."""
        return self._overlap == "none"

    def layer_done(
        self, block_ids: Sequence[int], layer: int, start: int, end: int, others: Sequence[Sequence[int]] = ()
    ) -> list[Piece]:
        """The pieces completed by layer `layer` of tokens [start, end), which is now in the blocks `block_ids` of this
        request, or in `others` if its group has a table there. The blocks before `start` were cached and are
        complete."""
        here = [block_ids, *others]
        if self._overlap == "layer":
            return self._layer(here, layer, start, end)
        if layer < self._layers[-1] or (self._overlap == "none" and end < self._num_tokens):
            return []
        size = self._geometry.block_size
        indices = range(self._target.first_missing, -(-end // size))
        pieces = [piece for group in range(len(here)) for piece in self._whole(here, group, indices, end)]
        self._complete.difference_update((g, i) for g in range(len(here)) for i in range(end // size, -(-end // size)))
        return pieces

    def _layer(self, here: Tables, layer: int, start: int, end: int) -> list[Piece]:
        size, first = self._geometry.block_size, self._target.first_missing
        cached = range(first, start // size) if layer == self._layers[0] else ()
        found = [piece for each in range(len(here)) for piece in self._whole(here, each, cached, start)]
        touched = range(max(start // size, first), -(-end // size))
        pieces = [
            self._piece(here, group, i, offset, nbytes, end)
            for group, offset, nbytes in self._geometry.pieces(layer)
            for i in touched
            if self._there[group][i] != GONE
        ]
        if layer == self._layers[-1]:
            ended = range(max(start // size, first), end // size)
            self._complete.update((each, i) for each in range(len(here)) for i in ended)
        return found + pieces

    def _whole(self, here: Tables, group: int, indices: Iterable[int], end: int) -> list[Piece]:
        missing = [i for i in indices if (group, i) not in self._complete and self._there[group][i] != GONE]
        self._complete.update((group, i) for i in missing)
        return [self._piece(here, group, i, *self._span, end) for i in missing]

    def completes(self, layer: int, end: int) -> bool:
        """Whether with layer `layer` of the tokens before `end` all pieces of these tokens have been handed out."""
        return layer == self._layers[-1] and (self._overlap != "none" or end >= self._num_tokens)

    def _piece(self, here: Tables, group: int, index: int, offset: int, nbytes: int, end: int) -> Piece:
        size, block_id = self._geometry.block_bytes, here[group][index]
        tokens = min(self._geometry.block_size, end - index * self._geometry.block_size)
        return Piece(block_id, block_id * size + offset, self._there[group][index] * size + offset, nbytes, tokens)
