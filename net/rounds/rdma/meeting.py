"""Two processes that have met over TCP connect queue pairs, or agree that messages go over TCP.

    answering side                                         asking side
    {..., "side": Side}                           ──>
                              <──  {"side": Side}
    {"reached": true}             ──>                      a write of the answering side has arrived
                              <──  {"reached": true}       and one of the asking side

In place of each, {"tcp": why} ends it. The first one comes with what the answering side says anyway when it is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from net import bodies
from net.channel.wire import Header
from net.errors import PeerLost
from net.rounds.desk import ANSWERED_AT, ASKED_AT, new_region
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.rdma.mirror import Mirror, Side
from net.rounds.rdma.rdma_desk import HEAD
from net.transfer.common.transport import Unusable


class _Told(Unusable):
    """The other side has said why."""


def opened(device: str, gid_index: int | None, layout: Layout) -> Mirror | str:
    """With new memory for a desk; or why that cannot be."""
    try:
        # Shared, because a fork of this process moves pages that are private, and a card would keep the old ones.
        region = new_region("desk that cards write", layout)
    except OSError as error:
        return str(error)
    parts = [
        *layout.parts(layout.most_rows, layout.most_rows * layout.top_k),
        (layout.message_bytes, layout.answer_bytes),
    ]
    try:
        return Mirror(device, gid_index, region, [HEAD, *((PAGE + at, nbytes) for at, nbytes in parts)])
    except Unusable as error:
        region.close()
        return str(error)


def told(mirror: Mirror | str) -> Header:
    """What the answering side says first."""
    return {"tcp": mirror} if isinstance(mirror, str) else {"side": bodies.encode(mirror.side)}


def answer(wire: FrameSocket, mirror: Mirror | str) -> Mirror | str:
    """The answering side, when it has said that: the mirror, connected, or why messages go over TCP. Raises
    PeerLost."""
    if isinstance(mirror, str):
        return mirror
    try:
        with _closing(wire, mirror):
            mirror.connect(_side(wire.frame().header))
            mirror.probe(ANSWERED_AT)
            wire.send({"reached": True})
            _said(wire.frame().header, "reached")
    except Unusable as error:
        return str(error)
    return mirror


def ask(wire: FrameSocket, first: Header, device: str, gid_index: int | None, layout: Layout) -> Mirror | str:
    """The asking side; `first`: what the other one has said. As `answer` otherwise."""
    try:
        there = _side(first)
    except Unusable as error:
        return str(error)
    mirror = opened(device, gid_index, layout)
    if isinstance(mirror, str):
        wire.send({"tcp": mirror})
        return mirror
    try:
        with _closing(wire, mirror):
            mirror.connect(there)
            wire.send(told(mirror))
            _said(wire.frame().header, "reached")
            mirror.probe(ASKED_AT)
            wire.send({"reached": True})
    except Unusable as error:
        return str(error)
    return mirror


@contextmanager
def _closing(wire: FrameSocket, mirror: Mirror) -> Iterator[None]:
    """If this fails, the mirror is closed and the other side hears why."""
    try:
        yield
    except BaseException as error:
        mirror.discard()
        if isinstance(error, Unusable) and not isinstance(error, _Told):
            wire.send({"tcp": str(error)})
        raise


def _said(header: Header, name: str) -> object:
    """The field of this name. Raises _Told, PeerLost for anything else."""
    if "tcp" in header:
        raise _Told(str(header["tcp"]))
    if name not in header:
        raise PeerLost(f"it was to say {name!r} of RDMA, and said something else")
    return header[name]


def _side(header: Header) -> Side:
    """Raises _Told, PeerLost for anything else than a Side."""
    try:
        return bodies.decode(Side, _said(header, "side"))
    except bodies.BodyError as error:
        raise PeerLost(f"its description of a queue pair is none: {error}") from None
