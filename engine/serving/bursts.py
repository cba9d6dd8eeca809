"""Asking whether a prompt's new blocks are being computed somewhere already; the claims are sched/intents.py's.

engine.intend{node, ready_s, instead_of} + keys  ──>  <── {coming}     to the home of the prompt's first block
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cache.block import KEY_BYTES, BlockKey
from engine.serving import messages
from net.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.gossip import Gossip
from sched.intents import Coming, Intents, Ring, claimed_depths, home_of

ASK_S = 0.1
"""A home that does not answer within this, or within the time that the prefill takes, has nothing to say."""

MOST_KEYS = 96
MOST_S = 600.0


class Bursts:
    """The claims kept here, and the way to those kept elsewhere."""

    def __init__(self, channel: Channel, gossip: Gossip) -> None:
        self._channel = channel
        self._kept = Intents()
        channel.handle(messages.INTEND, self._on_intend)
        gossip.on_down(lambda member, reason: self._kept.drop(member.node_id))

    async def claim(
        self, keys: Sequence[BlockKey], known: int, ring: Ring, node: str, ready_s: float, instead_of: str = ""
    ) -> dict[str, Coming]:
        """`node` is to compute the blocks of `keys` behind the `known` leading ones, which takes `ready_s`. Returns, by
        node, how many leading blocks are being computed already; then nothing was claimed. Empty too when the home
        does not answer."""
        depths = claimed_depths(known, len(keys))
        if not depths or not ring:
            return {}
        home = home_of(keys[0], ring)
        claimed = [keys[depth - 1] for depth in depths]
        ready_s = min(ready_s, MOST_S)
        if home == self._channel.node_id:
            coming = self._kept.claim(time.monotonic(), claimed, node, ready_s, instead_of)
        else:
            body = {"node": node, "ready_s": ready_s, "instead_of": instead_of}
            try:
                reply, _ = await self._channel.call(
                    home, messages.INTEND, body, [b"".join(claimed)], max(ASK_S, ready_s)
                )
            except (PeerLost, PeerRefused, RemoteError, TimeoutError):
                return {}
            coming = {
                name: Coming(count, left)
                for name, (count, left) in reply["coming"].items()
                if 0 < count <= len(depths)  # by no means more than was asked about
            }
        return {name: Coming(depths[found.depth - 1], found.ready_s) for name, found in coming.items()}

    async def _on_intend(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        return answer(self._kept, time.monotonic(), body, data)


def answer(kept: Intents, now: float, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
    """What a peer learns that would have these blocks computed. Raises RemoteError for a question that is none."""
    ready_s = body.get("ready_s")
    if not isinstance(ready_s, int | float) or not 0 <= ready_s <= MOST_S:
        raise RemoteError(f"a claim must be ready within {MOST_S:g} s", code="bad_request")
    if not 0 < len(data) <= MOST_KEYS * KEY_BYTES or len(data) % KEY_BYTES:
        raise RemoteError(f"a claim may have at most {MOST_KEYS} keys", code="bad_request")
    node, instead_of = body.get("node"), body.get("instead_of")
    if not isinstance(node, str) or not isinstance(instead_of, str):
        raise RemoteError(
            "a claim must name the node that computes, and the node it replaces or none", code="bad_request"
        )
    keys = [bytes(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]
    coming = kept.claim(now, keys, node, ready_s, instead_of)
    return {"coming": {name: [found.depth, found.ready_s] for name, found in coming.items()}}
