"""Finds out whether another node already computes a prompt's new blocks, through the claims of sched/gossip/intents.py.

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

MIN_ANSWER_WAIT_S = 0.1
"""Minimum wait for the home's answer, seconds; it is longer if the prefill takes longer."""

MAX_CLAIM_KEYS = 96
MAX_READY_S = 600.0


class Bursts:
    """Claims kept on this node, and access to those on other homes."""

    def __init__(self, channel: Channel, gossip: Gossip) -> None:
        self._channel = channel
        self._kept = Intents()
        channel.handle(messages.INTEND, typed(Intend, self._on_intend))
        gossip.on_down(lambda member, reason: self._kept.drop(member.node_id))

    async def claim(
        self, keys: Sequence[BlockKey], known: int, ring: Ring, node: str, ready_s: float, instead_of: str = ""
    ) -> dict[str, Coming]:
        """Claim for `node` the blocks of `keys` after the first `known`, which it will compute within `ready_s`. If
        other nodes already compute some, nothing is claimed, and this returns the number of leading blocks per node.
        Returns an empty dict if the claim succeeds or the home does not answer."""
        depths = claimed_depths(known, len(keys))
        if not depths or not ring:
            return {}
        home = home_of(keys[0], ring)
        claimed = [keys[depth - 1] for depth in depths]
        ready_s = min(ready_s, MAX_READY_S)
        if home == self._channel.node_id:
            coming = self._kept.claim(time.monotonic(), claimed, node, ready_s, instead_of)
        else:
            body = encode(Intend(node, ready_s, instead_of))
            try:
                reply, _ = await self._channel.call(
                    home, messages.INTEND, body, [b"".join(claimed)], max(MIN_ANSWER_WAIT_S, ready_s)
                )
                intended = answered(Intended, reply).coming
            except (PeerLost, PeerRefused, RemoteError, TimeoutError):
                return {}
            coming = {name: found for name, found in intended.items() if 0 < found.depth <= len(depths)}
        return {name: Coming(depths[found.depth - 1], found.ready_s) for name, found in coming.items()}

    async def _on_intend(self, peer: str, body: Intend, data: memoryview) -> Intended:
        return answer(self._kept, time.monotonic(), body, data)


def answer(kept: Intents, now: float, body: Intend, data: memoryview) -> Intended:
    """The answer to a peer that claims blocks. Raises BodyError for an invalid question."""
    if not 0 <= body.ready_s <= MAX_READY_S:
        raise BodyError(f"a claim must be ready within {MAX_READY_S:g} s")
    if not 0 < len(data) <= MAX_CLAIM_KEYS * KEY_BYTES or len(data) % KEY_BYTES:
        raise BodyError(f"a claim may have at most {MAX_CLAIM_KEYS} keys")
    return Intended(kept.claim(now, split_keys(data), body.node, body.ready_s, body.instead_of))
