"""Asking whether a prompt's new blocks are being computed somewhere already; the claims are sched/gossip/intents.py's.

engine.intend{node, ready_s, instead_of} + keys  ──>  <── {coming}     to the home of the prompt's first block
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from cache.block import KEY_BYTES, BlockKey
from engine.handoff import messages
from engine.handoff.messages import Intend, Intended, split_keys
from net.bodies import BodyError, answered, encode, typed
from net.channel.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.gossip.driver import Gossip
from sched.gossip.intents import Coming, Intents, Ring, claimed_depths, home_of

ASK_S = 0.1
"""A home that does not answer within this, or within the time that the prefill takes, has nothing to say."""

MOST_KEYS = 96
MOST_S = 600.0


class Bursts:
    """The claims kept here, and the way to those kept elsewhere."""

    def __init__(self, channel: Channel, gossip: Gossip) -> None:
        self._channel = channel
        self._kept = Intents()
        channel.handle(messages.INTEND, typed(Intend, self._on_intend))
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
            body = encode(Intend(node, ready_s, instead_of))
            try:
                reply, _ = await self._channel.call(
                    home, messages.INTEND, body, [b"".join(claimed)], max(ASK_S, ready_s)
                )
                told = answered(Intended, reply).coming
            except (PeerLost, PeerRefused, RemoteError, TimeoutError):
                return {}
            coming = {name: found for name, found in told.items() if 0 < found.depth <= len(depths)}  # as was asked
        return {name: Coming(depths[found.depth - 1], found.ready_s) for name, found in coming.items()}

    async def _on_intend(self, peer: str, body: Intend, data: memoryview) -> Intended:
        return answer(self._kept, time.monotonic(), body, data)


def answer(kept: Intents, now: float, body: Intend, data: memoryview) -> Intended:
    """What a peer learns that would have these blocks computed. Raises BodyError for a question that is none."""
    if not 0 <= body.ready_s <= MOST_S:
        raise BodyError(f"a claim must be ready within {MOST_S:g} s")
    if not 0 < len(data) <= MOST_KEYS * KEY_BYTES or len(data) % KEY_BYTES:
        raise BodyError(f"a claim may have at most {MOST_KEYS} keys")
    return Intended(kept.claim(now, split_keys(data), body.node, body.ready_s, body.instead_of))
