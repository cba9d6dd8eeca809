"""A part of a prompt out of another node's KV arena: the reader's side of lending.py.

Both nodes have the same root (nodes with another root cannot connect) and blocks of the same form (others are not
asked, and refuse), so a key names the same bytes in both arenas.
This node reads blocks unchanged, directly into blocks of its own arena.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from cache.block import BlockGeometry, BlockKey
from cache.protocol import join_keys
from cache.results import GetResult
from cache.store.calls import HOME_ERRORS
from engine.handoff.lending import LOAN_S
from engine.handoff.messages import BORROW, RETURN, Borrow, Borrowed, Return, Returned
from net.bodies import answered, encode
from net.channel.channel import Channel
from net.transfer.engine import URGENT, Completion, Op, TransferEngine

log = logging.getLogger("mooncake.engine")

ANSWER_S = 3.0
READ_S = LOAN_S - ANSWER_S  # the reader's deadline passes before the loan ends
WINDOW_BYTES = 32 << 20  # of one loan: bounds the blocks that a slow reader protects from eviction

ARENA = "arena"
"""The tier of blocks from another arena."""


class Borrowing:
    """Reads blocks of other nodes into `region`, this node's arena with blocks of `geometry`, each of which has the
    tokens of `each` blocks of the pool."""

    def __init__(
        self, channel: Channel, transfer: TransferEngine, region: str, geometry: BlockGeometry, each: int = 1
    ) -> None:
        self._channel = channel
        self._transfer = transfer
        self._region = region
        self._block_bytes, self._dtype, self._each = geometry.block_bytes, geometry.dtype, each
        self._window = max(1, WINDOW_BYTES // self._block_bytes)
        self._numbers = count(random.getrandbits(40) << 12)  # differ from those before a restart of this node

    async def get(self, node: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        """Reads the leading run of `keys` that `node` has into the blocks `block_ids`; the content of later blocks is
        undefined. The result is empty if the node is lost or does not answer. Nothing is written after this returns or
        is cancelled."""
        blocks, transports = 0, Counter[str]()
        while blocks < len(keys):
            part = slice(blocks, blocks + self._window)
            try:
                done = await self._borrow(node, keys[part], block_ids[part])
            except HOME_ERRORS as error:
                log.info("a prefix in the arena of %s: %r", node, error)
                break
            arrived = 0 if done is None else done.nbytes // self._block_bytes
            if done is not None:
                transports[done.transport] += arrived
            blocks += arrived
            if arrived < len(keys[part]):
                break
        if not blocks:
            return GetResult(0, 0)
        pooled = blocks * self._each  # sources and tiers count blocks of the pool
        return GetResult(blocks, blocks * self._block_bytes, {node: pooled}, dict(transports), {ARENA: pooled})

    async def _borrow(self, node: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> Completion | None:
        """None when the node has no leading part of `keys`, or did not keep it until the end of the read."""
        loan, size, open_there = next(self._numbers), self._block_bytes, True
        try:
            body = encode(Borrow(loan, size, self._dtype))
            reply, _ = await self._channel.call(node, BORROW, body, [join_keys(keys)], ANSWER_S)
            there = answered(Borrowed, reply)
            if not there.blocks:
                open_there = False
                return None
            spans = [(here * size, block * size, size) for here, block in zip(block_ids, there.blocks, strict=False)]
            done = await self._transfer.submit(node, Op.READ, self._region, there.region, spans, READ_S, URGENT)
            reply, _ = await self._channel.call(node, RETURN, encode(Return(loan)), timeout_s=ANSWER_S)
            open_there = False
            return done if answered(Returned, reply).whole else None
        finally:
            if open_there:
                with suppress(ConnectionError):  # a lost node ends the loan by itself
                    self._channel.post(node, RETURN, encode(Return(loan)))
