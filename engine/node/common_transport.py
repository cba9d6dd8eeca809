"""Refuses to join a cluster whose nodes have no transport in common with this one.

--transport may name a transport that does not work between two nodes: one has shm and the other tcp, they run on
different hosts, or one has no RDMA device. Such a node would join, look healthy and serve nothing, because no KV could
reach it. With --transport auto on both sides TCP always works, so nothing is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.config.flags import UsageError
from net.channel.channel import Channel
from net.errors import TransferError
from net.transfer.engine import TransferEngine
from sched.membership.member import Member, Status

AUTO = "auto"
MAX_PEERS = 64
"""Members that a joining node tries."""


def named(transport: str) -> dict[str, str]:
    """The part of a node's description that names its --transport."""
    return {} if transport == AUTO else {"transport": transport}


async def check(transport: str, channel: Channel, transfer: TransferEngine, members: Iterable[Member]) -> None:
    """`transport`: --transport of this node. Raises UsageError that names a member without a common transport. A
    member that does not answer is none of these."""
    others = [
        member.node_id
        for member in members
        if member.node_id != channel.node_id
        and member.status is Status.ALIVE
        and (transport != AUTO or named(str(member.info.get("transport", AUTO))))
    ]
    paths = (transfer.open(node_id) for node_id in others[:MAX_PEERS])
    for end in await asyncio.gather(*paths, return_exceptions=True):
        if isinstance(end, TransferError):
            raise UsageError(f"--transport {transport}: {end}; give all nodes the same, or auto")
