"""A part of a prompt out of another node's KV arena: the reader's side of lending.py.

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
READ_S = LOAN_S - ANSWER_S  # the reader's own deadline is met before the loan ends
WINDOW_BYTES = 32 << 20  # of one loan: bounds what a slow reader keeps from being evicted

ARENA = "arena"
"""The tier of what comes from there."""


class Borrowing:
    """Reads blocks of other nodes into `region`, this node's arena with blocks of `block_bytes`."""

    def __init__(self, channel: Channel, transfer: TransferEngine, region: str, block_bytes: int) -> None:
        self._channel = channel
        self._transfer = transfer
        self._region = region
        self._block_bytes = block_bytes
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._numbers = count(random.getrandbits(40) << 12)  # not those of this node's earlier life

    async def get(self, node: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> GetResult:
        """The leading run of `keys` that `node` has, in the blocks `block_ids`; what lies in those behind the run is
        undefined. A node that is lost or does not answer has nothing. Nothing is written any more when this returns or
        is cancelled."""
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
        """None when the node has no leading part of `keys`, or did not keep it until it was read."""
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
                with suppress(ConnectionError):  # a node that is lost knows by itself
                    self._channel.post(node, messages.RETURN, {"loan": loan})
