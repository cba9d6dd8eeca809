"""Sends the bytes of a transfer over a data connection: frames in turns, as fast as the peer reads."""

from __future__ import annotations

from collections.abc import Callable

from net.channel.connection import Connection
from net.channel.wire import Header
from net.transfer.tcp.bulk_call import Source

FRAME_BYTES = 4 << 20  # the largest data frame
SMALL_FRAME_BYTES = 64 << 10  # the largest frame that needs no turn


async def push(
    connection: Connection, transfer_id: int, source: Source, stopped: Callable[[], bool], first: Header | None = None
) -> None:
    """Send all of `source` as data frames, in turns, as fast as the peer reads; `first`: another header for the first
    frame. Ends early if `stopped`. Raises PeerLost; the connection cuts off a peer that stops reading."""
    header = first or {"op": "data", "id": transfer_id}
    while source.left and not stopped():
        await connection.drain()
        await connection.turns.wait()
        if not connection.congested and not stopped():
            nbytes = min(FRAME_BYTES, source.left)
            connection.send_views(header, source.take(nbytes), nbytes)
            header = {"op": "data", "id": transfer_id}


def at_once(connection: Connection, nbytes: int) -> bool:
    """Whether `nbytes` may be sent now: the peer keeps up, and it is not another transfer's turn."""
    free = nbytes <= FRAME_BYTES and not connection.congested
    return free and (nbytes <= SMALL_FRAME_BYTES or connection.turns.take())
