"""Asking whether a prompt's new blocks are being computed somewhere already; the claims are sched/intents.py's.

engine.intend{node, ttl_s} + keys  ──>  <── {reached}     to the home of the prompt's first block
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cache.block import KEY_BYTES, BlockKey
from engine.serving import messages
from net.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.gossip import Gossip
from sched.intents import Intents, Ring, claimed_depths, home_of

ASK_S = 0.1
MOST_KEYS = 96
MOST_S = 600.0


class Bursts:
    """The claims kept here, and the way to those kept elsewhere."""

    def __init__(self, channel: Channel, gossip: Gossip) -> None:
        self._channel = channel
        self._kept = Intents()
        channel.handle(messages.INTEND, self._on_intend)
        gossip.on_down(lambda member, reason: self._kept.drop(member.node_id))

    async def claim(self, keys: Sequence[BlockKey], known: int, ring: Ring, node: str, ttl_s: float) -> dict[str, int]:
        """`node` is to compute the blocks of `keys` behind the `known` leading ones. Returns, by node, how many leading
        blocks are being computed there already; then nothing was claimed. Empty too when the home does not answer."""
        depths = claimed_depths(known, len(keys))
        if not depths or not ring:
            return {}
        home = home_of(keys[0], ring)
        claimed = [keys[depth - 1] for depth in depths]
        ttl_s = min(ttl_s, MOST_S)
        if home == self._channel.node_id:
            reached = self._kept.claim(time.monotonic(), claimed, node, ttl_s)
        else:
            body = {"node": node, "ttl_s": ttl_s}
            try:
                reply, _ = await self._channel.call(home, messages.INTEND, body, [b"".join(claimed)], ASK_S)
            except (PeerLost, PeerRefused, RemoteError, TimeoutError):
                return {}
            reached = reply["reached"]
        return {name: depths[count - 1] for name, count in reached.items()}

    async def _on_intend(self, peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any]:
        if not 0 < len(data) <= MOST_KEYS * KEY_BYTES or len(data) % KEY_BYTES or not 0 < body["ttl_s"] <= MOST_S:
            raise RemoteError(f"a claim has up to {MOST_KEYS} keys and {MOST_S:g} s to live", code="bad_request")
        keys = [bytes(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]
        return {"reached": self._kept.claim(time.monotonic(), keys, body["node"], body["ttl_s"])}
