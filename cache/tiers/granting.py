"""Granting: which of the blocks that writers offer get a slot of a LocalStore, and what the writers of others are told.

Who writes is the first to bring a block (then the home decides what is under its key: `decide`, where the key does not
name the content), or brings a copy of what another home has taken. Copies are compared with what is here, by
cache/homes/agreement.py: one content stays, and the keys of which other homes have to be told are in `uneven`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cache.block import BlockKey
from cache.homes.agreement import Content, Removals, Uneven, differ, stays
from cache.pool.policy import Facts
from cache.protocol import GONE, OTHER, PRESENT, WRITING
from cache.tiers.local_store import LocalStore, NoSpace
from net.errors import RemoteError


class Granting:
    """`passed_on(key)`: whether the writer of that block was sent to another member lately."""

    def __init__(self, local: LocalStore, passed_on: Callable[[BlockKey], bool]) -> None:
        self._local = local
        self._passed_on = passed_on
        self.removals = Removals()
        self.uneven = Uneven()

    def grant(self, now: float, keys: list[BlockKey], body: Mapping[str, Any]) -> list[int]:
        """Slots, or what is said instead, for a leading part of `keys`; `body` as of store.reserve. Raises ValueError
        when it does not fit the keys."""
        facts = facts_in(body, len(keys))
        kept: Iterable[bool] = body.get("kept") or [False] * len(keys)
        offered: Iterable[Content | None] = contents_of(body) or [None] * len(keys)
        decide, repair = body.get("decide", False), body.get("repair", False)
        answers: list[int] = []
        try:
            for key, about, content, keep in zip(keys, facts, offered, kept, strict=True):
                if decide and body.get("divert", False) and self._passed_on(key):
                    break  # who has it instead of this node knows whether there is a value already
                if content is not None:
                    answers.append(self._copy(now, key, about, content, repair, keep))
                else:
                    answers.append(self._first(key, about, decide))
        except NoSpace:
            pass
        except Exception:  # the body is not as agreed, which may show late
            for slot in answers:
                if slot >= 0:
                    self._local.abandon(slot)
            raise
        return answers

    def _first(self, key: BlockKey, about: Facts | None, decide: bool) -> int:
        slot = self._local.reserve(key, about)
        if slot is None:
            return WRITING if decide and self._local.arriving(key) else PRESENT
        return slot

    def _copy(self, now: float, key: BlockKey, about: Facts | None, offered: Content, repair: bool, keep: bool) -> int:
        here = self._local.contains(key) is not None
        if repair and self.removals.gone(now, key, offered):
            self.uneven.add([key] if here else ())  # it was put again: who drops the old value lacks the new one
            return GONE
        if self._local.arriving(key):
            return WRITING
        if not here:
            if repair and self.removals.lately(now, key):
                return PRESENT
            slot = self._local.reserve(key, about, copy=True, keep=keep)
            return PRESENT if slot is None else slot
        if self.has(key, offered):
            return PRESENT
        self.uneven.seen += 1
        self.uneven.add([key])
        ours = self._local.content(key)
        if ours is not None and stays(ours, offered):
            return OTHER
        try:
            slot = self._local.reserve(key, about, copy=True, keep=keep, over=True)
        except NoSpace:
            return WRITING
        return WRITING if slot is None else slot

    def has(self, key: BlockKey, content: Content | None) -> bool:
        """Whether the block is here, and if `content` is given, with that one."""
        if self._local.contains(key) is None:
            return False
        ours = self._local.content(key)
        return content is None or ours is None or not differ(ours, content)

    def stored(self, key: BlockKey, repair: bool) -> None:
        """The block is here now."""
        if not repair and (content := self._local.content(key)) is not None:
            self.removals.put_again(key, content)


def contents_of(body: Mapping[str, Any]) -> list[Content]:
    """As they travel."""
    return [(block_checksum, length) for block_checksum, length in body.get("contents", ())]


def facts_in(body: Mapping[str, Any], count: int) -> list[Facts | None]:
    """Of `count` blocks, as a writer sent them. Raises RemoteError."""
    rows = body.get("facts")
    if not rows:
        return [None] * count
    if len(rows) not in (1, count):
        raise RemoteError(f"got facts of {len(rows)} blocks, expected {count}", "bad_request")
    return [Facts(*row) for row in (rows if len(rows) == count else rows * count)]
