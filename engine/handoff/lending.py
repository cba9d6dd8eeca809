"""Blocks of this node's arena that another node reads as the prefix of a prompt, kept where they are meanwhile.

    reader (borrowing.py)                        this node
    engine.kv.borrow(loan, keys) ─────────────>  a transfer reference on each block of the leading run of `keys`
                    <── reply: region, blocks ──
    READs them                                   takes no part
    engine.kv.return(loan) ───────────────────>  the references go
                              <── reply: whole ──  whether they were held until now

A loan ends when the reader returns it, when the reader leaves or is lost, and at its deadline. A READ that still runs
then may fetch the content of another request, so the reader uses no bytes before it has received `whole`. Readers never
write here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from cache.protocol import split_keys
from engine.handoff.messages import BORROW, RETURN, Borrow, Borrowed, Return, Returned
from net.bodies import typed
from net.channel.channel import Channel
from net.errors import RemoteError

LOAN_S = 15.0
"""Seconds for which a reader that stops can keep blocks, at most."""

MAX_LENT_SHARE = 0.5
"""Maximum lent share of the arena: lent blocks cannot be evicted for this node's own requests."""


@dataclass(frozen=True, slots=True)
class Loan:
    block_ids: list[int]
    timer: asyncio.TimerHandle


class Lending:
    """All loans of a node, by reader and by the number that the reader chose."""

    def __init__(
        self, channel: Channel, pool: BlockPool, region: str, geometry: BlockGeometry, loan_s: float = LOAN_S
    ) -> None:
        """region: the name of the arena of `pool` for peers."""
        self._pool = pool
        self._region = region
        self._form = geometry.block_bytes, geometry.dtype
        self._loan_s = loan_s
        self._loans: dict[tuple[str, int], Loan] = {}
        self.expired = 0  # loans that ended by their deadline
        channel.handle(BORROW, typed(Borrow, self._on_borrow))
        channel.handle(RETURN, typed(Return, self._on_return))
        channel.on_lost(self._gone)
        channel.on_closed(self._gone)

    def __len__(self) -> int:
        return len(self._loans)

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here."""
        return (block_id for loan in self._loans.values() for block_id in loan.block_ids)

    async def _on_borrow(self, peer: str, body: Borrow, data: memoryview) -> Borrowed:
        """Awaits nothing, so a later return cannot overtake it."""
        name = peer, body.loan
        if name in self._loans:
            raise RemoteError(f"loan {body.loan} is in use", "bad_request")
        if (body.block_bytes, body.dtype) != self._form:
            (nbytes, dtype), (theirs, other) = self._form, (body.block_bytes, body.dtype)
            raise RemoteError(f"blocks have {nbytes} bytes of {dtype} here, not {theirs} of {other}", "layout")
        room = int(MAX_LENT_SHARE * self._pool.num_blocks) - sum(len(loan.block_ids) for loan in self._loans.values())
        found = self._pool.match(split_keys(data))[: max(0, room)]
        if found:
            self._pool.hold(found)
            self._pool.touch(found)
            timer = asyncio.get_running_loop().call_later(self._loan_s, self._expire, name)
            self._loans[name] = Loan(found, timer)
        return Borrowed(self._region, found)

    async def _on_return(self, peer: str, body: Return, data: memoryview) -> Returned:
        return Returned(self._end((peer, body.loan)))

    def _end(self, name: tuple[str, int]) -> bool:
        loan = self._loans.pop(name, None)
        if loan is None:
            return False
        loan.timer.cancel()
        self._pool.unhold(loan.block_ids)
        return True

    def _expire(self, name: tuple[str, int]) -> None:
        self.expired += self._end(name)

    def _gone(self, peer: str) -> None:
        for name in [name for name in self._loans if name[0] == peer]:
            self._expire(name)

    def close(self) -> None:
        """Release all loans: this node ends."""
        for name in list(self._loans):
            self._end(name)
