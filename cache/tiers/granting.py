"""Granting: which of the blocks that writers offer get a slot of a LocalStore, and the answers for the others.

A writer either offers a new block (if the key does not identify the content, this home decides the content of the key:
`decide`), or a copy of a block that another home has accepted. cache/homes/agreement.py compares a copy with the
content here: one of them stays, and `uneven` collects the keys that other homes must hear of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.block import BlockKey
from cache.homes.agreement import Content, Removals, Uneven, differ, stays
from cache.offer import BlockFacts, Contents, Offer
from cache.pool.policy import Facts
from cache.protocol import GONE, OTHER, OVER, PRESENT, STORED, WRITING
from cache.tiers.local_store import LocalStore, NoSpace, QuotaReached


class Granting:
    """`passed_on(key)`: whether the writer of that block was recently sent to another member."""

    def __init__(self, local: LocalStore, passed_on: Callable[[BlockKey], bool]) -> None:
        self._local = local
        self._passed_on = passed_on
        self.removals = Removals()
        self.uneven = Uneven()

    def grant(self, now: float, keys: list[BlockKey], offer: Offer) -> list[int]:
        """Slots, or answers in place of slots, for a leading part of `keys`, which `offer` describes (Offer.check)."""
        facts = facts_of(offer.facts, len(keys))
        kept: Iterable[bool] = offer.kept or [False] * len(keys)
        offered = contents_of(offer.contents, len(keys))
        answers: list[int] = []
        try:
            for key, about, content, keep in zip(keys, facts, offered, kept, strict=True):
                if offer.decide and offer.divert and self._passed_on(key):
                    break  # the member that has it in place of this node knows whether there is a value already
                if content is not None:
                    answers.append(self._copy(now, key, about, content, offer.repair, keep))
                else:
                    answers.append(self._first(key, about, offer.decide))
        except NoSpace:
            pass
        except Exception:  # after any error, no slot stays reserved
            for slot in answers:
                if slot >= 0:
                    self._local.reservations.abandon(slot)
            raise
        return answers

    def _first(self, key: BlockKey, about: Facts | None, decide: bool) -> int:
        try:
            slot = self._local.reservations.reserve(key, about)
        except QuotaReached:
            return OVER
        if slot is None:
            return WRITING if decide and self._local.reservations.arriving(key) else PRESENT
        return slot

    def _copy(self, now: float, key: BlockKey, about: Facts | None, offered: Content, repair: bool, keep: bool) -> int:
        here = self._local.contains(key) is not None
        if repair and self.removals.gone(now, key, offered):
            self.uneven.add([key] if here else ())  # put again: homes that drop the old value lack the new one
            return GONE
        if self._local.reservations.arriving(key):
            return WRITING
        if not here:
            if repair and self.removals.lately(now, key):
                return PRESENT
            hidden = self._local.content(key)  # on a disk that cannot be read now
            if hidden is not None and differ(hidden, offered):
                if repair and stays(hidden, offered):
                    return WRITING
                self.uneven.add([key])  # the other homes may have the content that this copy displaces here
            slot = self._local.reservations.reserve(key, about, copy=True, keep=keep)
            return PRESENT if slot is None else slot
        if self.has(key, offered):
            return PRESENT
        self.uneven.seen += 1
        self.uneven.add([key])
        ours = self._local.content(key)
        if ours is not None and stays(ours, offered):
            return OTHER
        try:
            slot = self._local.reservations.reserve(key, about, copy=True, keep=keep, over=True)
        except NoSpace:
            return WRITING
        return WRITING if slot is None else slot

    def has(self, key: BlockKey, content: Content | None) -> bool:
        """Whether the block is here; if `content` is given, with that content."""
        if self._local.contains(key) is None:
            return False
        ours = self._local.content(key)
        return content is None or ours is None or not differ(ours, content)

    def arrived(self, key: BlockKey, slot: int, content: Content, *, copy: bool) -> int:
        """The block of a granted slot is there: STORED, or the answer if another one of its key has come meanwhile
        (cache/server/lending.py) and stays. Between a `copy` and that one, the contents decide, as in `grant`. Raises
        ValueError for an impossible length."""
        block_checksum, nbytes = content
        ours = self._local.content(key) if copy and self._local.contains(key) is not None else None
        other = ours is not None and differ(ours, content)
        over = other and ours is not None and not stays(ours, content)
        if self._local.commit(key, slot, block_checksum, nbytes, over=over):
            return STORED
        return OTHER if other else PRESENT

    def stored(self, key: BlockKey, repair: bool) -> None:
        """The block is here now."""
        if not repair and (content := self._local.content(key)) is not None:
            self.removals.put_again(key, content)


def contents_of(contents: Contents | None, count: int) -> Iterable[Content | None]:
    """The contents of `count` blocks; None for each without `contents`."""
    return [None] * count if contents is None else zip(contents.checksums, contents.lengths, strict=True)


def facts_of(facts: BlockFacts | None, count: int) -> list[Facts | None]:
    """The facts of `count` blocks; None for each without `facts`."""
    if facts is None:
        return [None] * count
    rows: list[Facts | None] = list(map(Facts, facts.positions, facts.costs_s, facts.service_classes))
    return rows if len(rows) == count else rows * count
