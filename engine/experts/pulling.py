"""An expert that no rank of the node's host has is pulled from one elsewhere, or else read from the checkpoint.

Both ends: a rank elsewhere lends its experts in pieces of PIECE bytes (Lender), over the connection that it has with
the node, and the node asks for them (Sources). Answers to the messages of a step wait for one piece at most.

A checksum is of bytes and of what they are: the model, the layer and the expert. So bytes of another expert are as
wrong as damaged ones. It goes with each piece, and with each expert that the node sends to a rank. A rank lends an
expert only by the number that it knows it by itself, and changes none in the middle of a piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.weights import Reader, open_weights
from engine.experts.joining import Welcome
from engine.experts.loading import lone_expert, lone_share
from engine.experts.plan import Plan
from engine.experts.share import Share
from net.errors import PeerLost
from net.rounds.connected_desk import ConnectedDesk
from net.rounds.desk import Desk

log = logging.getLogger("mooncake.experts")

PIECE = 2 << 20
MEMORY, RANKS, CHECKPOINT = "memory", "ranks", "checkpoint"
"""Where an expert comes from: memory of the node's host, a rank of another host, or the node's checkpoint."""

Copies = Iterable[tuple[Desk, int]]
"""The desk of each rank elsewhere that has an expert, and its slot there."""


class Brought(NamedTuple):
    """An expert in a share with no other one, and where it comes from."""

    share: Share
    origin: str


Bring = Callable[[int, int, Copies], Brought]
"""(layer, expert, copies) -> the expert."""


def checksum(fingerprint: str, layer: int, expert: int, views: Iterable[memoryview], at: int = 0) -> int:
    """Of bytes from `at` on of this expert of the model with this fingerprint; 63 bits."""
    seed = xxh3_64_intdigest(f"{fingerprint} {layer} {expert} {at}".encode())
    found = xxh3_64(seed=seed)
    for view in views:
        found.update(view)
    return found.intdigest() >> 1  # it travels among signed numbers


class Lender:
    """The end of a rank elsewhere. `experts`: in its share, by layer and slot. Who changes either does so inside
    `changing`."""

    def __init__(self, welcome: Welcome, share: Share, experts: Mapping[tuple[int, int], int]) -> None:
        self.changing = threading.Lock()
        self._fingerprint, self._share, self._experts = welcome.fingerprint, share, experts

    def give(self, name: Sequence[int], at: int, nbytes: int) -> tuple[memoryview, int] | None:
        """Bytes of layer, slot and expert, `name`; and their checksum. None if the share has no such bytes."""
        if len(name) != 3 or at < 0 or not 0 < nbytes <= PIECE:
            return None
        layer, slot, expert = name
        with self.changing:
            if self._experts.get((layer, slot)) != expert:
                return None
            piece = memoryview(cut(self._share.bytes_of(layer, slot), at, nbytes))
        return (piece, checksum(self._fingerprint, layer, expert, [piece], at)) if len(piece) == nbytes else None

    def check(self, layer: int, slot: int, expert: int, told: int) -> None:
        """Raises PeerLost if what has come for this slot is not this expert with this checksum."""
        if checksum(self._fingerprint, layer, expert, self._share.staged(layer, slot)) != told:
            raise PeerLost(f"expert {expert} of layer {layer} came damaged")


class Sources:
    """The node's end. Any thread may call."""

    def __init__(self, plan: Plan, source: ModelSource) -> None:
        self.source = source
        self._plan = plan
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((MEMORY, RANKS, CHECKPOINT), 0)

    @property
    def counts(self) -> dict[str, int]:
        """Experts that came to ranks, by where they came from."""
        return dict(self._counts)

    def count(self, origin: str, experts: int = 1) -> None:
        with self._lock:
            self._counts[origin] += experts

    def checksum(self, layer: int, expert: int, views: Iterable[memoryview]) -> int:
        """For the rank that gets the expert."""
        return checksum(self.source.fingerprint, layer, expert, views)

    def pulled(self, layer: int, expert: int, copies: Copies, lost: set[Desk]) -> Share | None:
        """From the first rank that gives the whole expert; None if none does. `lost`: desks that are not asked; those
        that fail are added."""
        for desk, slot in copies:
            if desk in lost:
                continue
            try:
                return self._pull(desk, layer, slot, expert)
            except PeerLost as error:
                lost.add(desk)
                log.warning("expert %d of layer %d cannot be pulled from a rank: %s", expert, layer, error)
        return None

    @contextmanager
    def opened(self) -> Iterator[Bring]:
        """Inside, what is yielded brings experts: from ranks elsewhere, or else from the checkpoint, which is opened
        when the first one comes from there. It raises ModelError, OSError."""
        with ExitStack() as stack:
            lost: set[Desk] = set()
            reader: Reader | None = None

            def bring(layer: int, expert: int, copies: Copies) -> Brought:
                nonlocal reader
                if (share := self.pulled(layer, expert, copies, lost)) is not None:
                    return Brought(share, RANKS)
                if reader is None:
                    dtype = getattr(torch, self._plan.layout.dtype)
                    reader = stack.enter_context(open_weights(self.source, dtype, None))
                return Brought(lone_expert(self._plan, reader, layer, expert), CHECKPOINT)

            yield bring

    def _pull(self, desk: Desk, layer: int, slot: int, expert: int) -> Share:
        if not isinstance(desk, ConnectedDesk):
            raise PeerLost("it has not joined")
        share = lone_share(self._plan, layer)
        parts = share.bytes_of(0, 0)
        whole = sum(map(len, parts))
        for at in range(0, whole, PIECE):
            piece, told = desk.pull((layer, slot, expert), at, min(PIECE, whole - at))
            if told != checksum(self.source.fingerprint, layer, expert, [piece], at):
                raise PeerLost("it came damaged")
            paste(parts, at, piece)
        return share


def cut(parts: Iterable[memoryview], at: int, nbytes: int) -> bytearray:
    """A copy of `nbytes` of the parts, as if they were one, from `at` on; fewer at their end."""
    found = bytearray()
    for part in parts:
        found += part[max(at, 0) : max(at + nbytes, 0)]
        at -= len(part)
    return found


def paste(parts: Iterable[memoryview], at: int, piece: memoryview) -> None:
    """The reverse: write the piece to the parts from `at` on."""
    for part in parts:
        room = part[max(at, 0) : max(at + len(piece), 0)]
        begin = max(-at, 0)
        room[:] = piece[begin : begin + len(room)]
        at -= len(part)
