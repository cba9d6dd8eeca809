"""Granting: which of the blocks that writers offer get a slot of a LocalStore, and what the writers of others are told.

Who writes is the first to bring a block (then the home decides what is under its key: `decide`, where the key does not
name the content), or brings a copy of what another home has taken. Copies are compared with what is here, by
cache/homes/agreement.py: one content stays, and the keys of which other homes have to be told are in `uneven`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.block import BlockKey
from cache.homes.agreement import Content, Removals, Uneven, differ, stays
from cache.offer import BlockFacts, Contents, Offer
from cache.pool.policy import Facts
from cache.protocol import GONE, OTHER, PRESENT, WRITING
from cache.tiers.local_store import LocalStore, NoSpace


class Granting:
    """`passed_on(key)`: whether the writer of that block was sent to another member lately."""

    def __init__(self, local: LocalStore, passed_on: Callable[[BlockKey], bool]) -> None:
        self._local = local
        self._passed_on = passed_on
        self.removals = Removals()
        self.uneven = Uneven()

    def grant(self, now: float, keys: list[BlockKey], offer: Offer) -> list[int]:
        """Slots, or what is said instead, for a leading part of `keys`, which `offer` is about (Offer.check)."""
        facts = facts_of(offer.facts, len(keys))
        kept: Iterable[bool] = offer.kept or [False] * len(keys)
        offered = contents_of(offer.contents, len(keys))
        answers: list[int] = []
        try:
            for key, about, content, keep in zip(keys, facts, offered, kept, strict=True):
                if offer.decide and offer.divert and self._passed_on(key):
                    break  # who has it instead of this node knows whether there is a value already
                if content is not None:
                    answers.append(self._copy(now, key, about, content, offer.repair, keep))
                else:
                    answers.append(self._first(key, about, offer.decide))
        except NoSpace:
            pass
        except Exception:  # whatever it is, no slot stays reserved
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


def contents_of(contents: Contents | None, count: int) -> Iterable[Content | None]:
    """Of `count` blocks."""
    return [None] * count if contents is None else zip(contents.checksums, contents.lengths, strict=True)


def facts_of(facts: BlockFacts | None, count: int) -> list[Facts | None]:
    """Of `count` blocks."""
    if facts is None:
        return [None] * count
    rows: list[Facts | None] = list(map(Facts, facts.positions, facts.costs_s, facts.service_classes))
    return rows if len(rows) == count else rows * count
