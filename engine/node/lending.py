"""Which requests the node takes, as it tells others, also beyond memory; and the start of its lending side.

With --attention-elsewhere a node holds blocks of others' requests and attends to them (engine/beyond/holder.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cache.block import BlockGeometry
from cache.tiers.local_store import LocalStore
from engine.beyond.messages import LENDS
from engine.checkpoint.model_source import ModelSource
from engine.config.beyond import beyond_room, lends
from engine.config.config import Config
from engine.config.resolve import context_tokens
from engine.front.beyond import BEYOND_TOKENS
from engine.front.cluster import Cluster
from engine.front.known import CONTEXT_TOKENS
from engine.node.parts import Blocks

if TYPE_CHECKING:
    from engine.beyond.holder import Holder  # torch, which other store nodes do not load


def told_context(config: Config, geometry: BlockGeometry) -> dict[str, int]:
    """Of a node that computes: how long a request in its arena may be."""
    return {CONTEXT_TOKENS: context_tokens(config, geometry)} if config.computes else {}


def told_beyond(config: Config, geometry: BlockGeometry) -> dict[str, int | bool]:
    """Of a node that takes requests whose KV exceeds its arena: how long they may be. Of a node that holds blocks of
    such requests: that it does."""
    told: dict[str, int | bool] = {LENDS: True} if lends(config, geometry) else {}
    if (room := beyond_room(config, geometry)) is not None:
        told[BEYOND_TOKENS] = min(room.tokens, config.max_model_len)
    return told


async def lend(config: Config, blocks: Blocks, source: ModelSource, cluster: Cluster) -> Holder | None:
    """None if this node lends nothing."""
    share = blocks.share
    if share is None or not lends(config, blocks.geometry):
        return None

    def make(share: LocalStore) -> Holder:
        """In a thread: a store node imports torch now, and kernels may be compiled."""
        from engine.beyond.holder import Holder

        return Holder(config, blocks.geometry, source.config.num_heads, share, cluster.channel)

    holder = await asyncio.to_thread(make, share)
    await holder.start(cluster.gossip.on_down)
    return holder
