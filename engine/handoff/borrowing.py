"""Reads a part of a prompt's KV from another node's arena: the reader's side of lending.py.

Both nodes have the same root (others are refused when they connect), so a key names the same bytes in both arenas:
blocks are read as they lie there, straight into blocks of this node's arena.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from cache.block import BlockKey
from cache.protocol import join_keys
from cache.results import GetResult
from cache.store.calls import HOME_ERRORS
from engine.handoff import messages
from engine.handoff.lending import LOAN_S
from net.channel.channel import Channel
from net.transfer.engine import URGENT, Completion, Op, TransferEngine

log = logging.getLogger("mooncake.engine")

ANSWER_S = 3.0
READ_S = LOAN_S - ANSWER_S  # the reader's own deadline passes before the loan ends
WINDOW_BYTES = 32 << 20  # per loan: limits the bytes that a slow reader protects from eviction

ARENA = "arena"
"""The tier name of blocks read from another arena."""


class Borrowing:
    """Reads blocks of other nodes into `region`, this node's arena, whose blocks have `block_bytes` bytes."""

    def __init__(self, channel: Channel, transfer: TransferEngine, region: str, block_bytes: int) -> None:
        self._channel = channel
        self._transfer = transfer
        self._region = region
        self._block_bytes = block_bytes
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._numbers = count(random.getrandbits(40) << 12)  # distinct from those before a restart

    async def get(self, node: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        """Read the leading run of `keys` that `node` holds into the blocks `block_ids`. The content of the blocks after
        the run is undefined. A node that is lost or does not answer counts as holding nothing. No write is in flight
        once this returns or is cancelled."""
        blocks, transports = 0, Counter[str]()
        while blocks < len(keys):
            part = slice(blocks, blocks + self._window)
            try:
                done = await self._borrow(node, keys[part], block_ids[part])
            except HOME_ERRORS as error:
                log.info("a prefix in the arena of %s: %r", node, error)
                break
            came = 0 if done is None else done.nbytes // self._block_bytes
            if done is not None:
                transports[done.transport] += came
            blocks += came
            if came < len(keys[part]):
                break
        if not blocks:
            return GetResult(0, 0)
        return GetResult(blocks, blocks * self._block_bytes, {node: blocks}, dict(transports), {ARENA: blocks})

    async def _borrow(self, node: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> Completion | None:
        """None if the node does not hold keys[0], or the loan ended before the read did."""
        loan, size, open_there = next(self._numbers), self._block_bytes, True
        try:
            body = {"loan": loan, "block_bytes": size}
            reply, _ = await self._channel.call(node, messages.BORROW, body, [join_keys(keys)], ANSWER_S)
            if not (there := reply["blocks"]):
                open_there = False
                return None
            spans = [(here * size, block * size, size) for here, block in zip(block_ids, there, strict=False)]
            done = await self._transfer.submit(node, Op.READ, self._region, reply["region"], spans, READ_S, URGENT)
            answer, _ = await self._channel.call(node, messages.RETURN, {"loan": loan}, timeout_s=ANSWER_S)
            open_there = False
            return done if answer["whole"] else None
        finally:
            if open_there:
                with suppress(ConnectionError):  # losing the connection ends the loan too
                    self._channel.post(node, messages.RETURN, {"loan": loan})
