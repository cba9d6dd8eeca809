"""Sends the bytes of a transfer over a data connection: frames in turns, as fast as the peer reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from net.channel.connection import Connection
from net.channel.wire import Header
from net.transfer.tcp.bulk_call import Source
from net.transfer.tcp.coding import CODED_FRAME_BYTES, CODED_MIN, RAW_BYTES, Encode

FRAME_BYTES = 4 << 20  # the largest data frame
SMALL_FRAME_BYTES = 64 << 10  # the largest frame that needs no turn


def frame_bytes(encode: Encode | None) -> int:
    """Raw bytes of the largest data frame."""
    return FRAME_BYTES if encode is None else CODED_FRAME_BYTES


def send_frame(
    connection: Connection, header: Header, views: Sequence[memoryview], nbytes: int, encode: Encode | None
) -> None:
    """Send `nbytes` as one frame, coded if that pays. Raises PeerLost."""
    coded = encode(views) if encode is not None and nbytes >= CODED_MIN else None
    if coded is None:
        connection.send_views(header, views, nbytes)
    else:
        connection.send_views(header | {RAW_BYTES: nbytes}, [coded], len(coded))


async def push(
    connection: Connection,
    transfer_id: int,
    source: Source,
    end: asyncio.Future[Any] | None,
    first: Header | None = None,
    encode: Encode | None = None,
    rank: int | None = None,
) -> None:
    """Send all of `source` as data frames, in turns, as fast as the peer reads; `first`: another header for the first
    frame; `rank`: another one than the connection's. Ends early when `end` is done, and otherwise when the socket has
    nearly all bytes. While more urgent bytes move, each wait of DEFER_S lets FRAME_BYTES of raw bytes go, in frames of
    any size: faster than deadlines assume (cache/protocol.py). Raises PeerLost; the connection cuts off a peer that
    stops reading."""

    def stopped() -> bool:
        return end is not None and end.done()

    most, order, peer_id = frame_bytes(encode), connection.order, connection.peer_id
    rank = connection.rank if rank is None else rank
    header = first or {"op": "data", "id": transfer_id}
    due = 0  # bytes that may be sent out of turn, because the transfer has waited long enough
    with order.sending(rank, connection, source.left >= FRAME_BYTES):
        while source.left and not stopped():
            if due <= 0 and await order.turn(rank, peer_id, end):
                due = FRAME_BYTES
            await connection.drain()
            await connection.turns.wait()
            if not connection.congested and not stopped() and (due > 0 or not order.is_behind(rank, peer_id)):
                nbytes = min(most, source.left)
                send_frame(connection, header, source.take(nbytes), nbytes, encode)
                due -= nbytes
                header = {"op": "data", "id": transfer_id}
        if not order.alone(rank, peer_id) and not stopped():
            await connection.drain()


def at_once(connection: Connection, nbytes: int, encode: Encode | None = None, rank: int | None = None) -> bool:
    """Whether `nbytes` may be sent now: the peer keeps up, and it is not another transfer's turn, here or on another
    connection."""
    free = nbytes <= frame_bytes(encode) and not connection.congested
    if not free or nbytes <= SMALL_FRAME_BYTES:
        return free
    rank = connection.rank if rank is None else rank
    if not connection.order.alone(rank, connection.peer_id) or not connection.turns.take():
        return False
    if nbytes >= FRAME_BYTES:
        connection.order.linger(rank)
    return True
