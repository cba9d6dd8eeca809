"""When a node collects garbage: cycles of objects that nobody uses any more.

Objects from the start-up live as long as the node. A full collection over them would hold every thread for half a
second, so no collection looks at them, and none runs during the start-up (mooncake.py switches them off). A node with
few requests hardly ever collects by itself, but the connections to a lost node, with their buffers, are cycles, which
would stay for hours. Those of nodes that were there before this one was ready do stay.
"""

from __future__ import annotations

import asyncio
import gc

from net.gossip.driver import Gossip
from sched.membership.member import Member

COLLECT_AFTER = 5_000, 10, 20
"""gc.set_threshold of a serving node: young objects per collection, and collections of a generation per collection of
the next. Python's own (700, 10, 10) makes 85 young collections and a full one while the largest body is parsed, and a
full one holds every thread for 10 to 40 ms: it looks at the timelines of the last thousand requests."""

LOST_S = 60.0
"""After a node was lost, this long passes until a full collection, which is one for all nodes lost meanwhile."""


def collect_seldom(gossip: Gossip) -> None:
    """From now on; every object that is there lives as long as the node. Call it in the event loop."""
    due = False

    def collect() -> None:
        nonlocal due
        due = False
        gc.collect()

    def lost(member: Member, reason: str) -> None:
        nonlocal due
        if not due:
            due = True
            asyncio.get_running_loop().call_later(LOST_S, collect)

    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()
    gossip.on_down(lost)
