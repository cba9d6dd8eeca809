"""Lasting: answers peers that need more than a slot in memory: durability, pins and flushes of this node's blocks.

DURABLE  keys -> which are synced on SSD; the answer waits for that
KEEP     keys -> which are never evicted from now on, or may be evicted again
FLUSH    the answer comes when all blocks committed so far are synced on SSD
"""

from __future__ import annotations

from collections.abc import Callable

from cache.messages import DURABLE, FLUSH, KEEP, Keep, KeptThere, MadeDurable, MakeDurable
from cache.protocol import ABSENT, KEPT, PINS_FULL, Deadlines, split_keys
from cache.ssd import SsdError
from cache.tiers.local_store import LocalStore
from net.bodies import Nothing, typed
from net.channel.channel import Channel
from net.errors import RemoteError

ANSWER_SHARE = 0.8  # of a deadline, so that an answer with the reason arrives in time


class Lasting:
    """Answers for `local`. `settle()`: announced blocks are here now (cache/server/lending.py)."""

    def __init__(self, channel: Channel, local: LocalStore, deadlines: Deadlines, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._local = local
        self._deadlines = deadlines
        channel.handle(DURABLE, typed(MakeDurable, self._durable))
        channel.handle(KEEP, typed(Keep, self._keep))
        channel.handle(FLUSH, typed(Nothing, self._flush))

    async def _durable(self, peer: str, body: MakeDurable, data: memoryview) -> MadeDurable:
        self._settle()
        keys = split_keys(data)
        wait_s = min(body.wait_s, self._deadlines.durable_s)
        durable = await self._local.make_durable(keys, ANSWER_SHARE * wait_s)
        if all(durable):
            return MadeDurable(durable)
        return MadeDurable(durable, self._why())

    def _why(self) -> str:
        if self._local.ssd is None:
            return "the home of the value has no SSD tier: give it --ssd-path"
        return self._local.trouble or "the SSD tier has not taken it in time, or it was removed meanwhile"

    async def _keep(self, peer: str, body: Keep, data: memoryview) -> KeptThere:
        self._settle()
        keys = split_keys(data)
        if not body.keep:
            return KeptThere(given_up=self._local.give_up(keys))
        answers = {True: KEPT, False: PINS_FULL, None: ABSENT}
        return KeptThere([answers[kept] for kept in self._local.keep(keys)])

    async def _flush(self, peer: str, body: Nothing, data: memoryview) -> None:
        self._settle()
        try:
            await self._local.flush(ANSWER_SHARE * self._deadlines.flush_s)
        except SsdError as error:
            raise RemoteError(str(error), "disk") from error
