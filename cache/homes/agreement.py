"""Which of two contents of one key stays: every replica says the same without asking anybody. Pure.

A key of KV, or of a part of an object, names its content, so any copy of it is right. A key that a user chose does not:
two clients may put different values where they, or the homes, do not see each other. Then the lesser content stays,
everywhere, whichever came first and by whatever way they meet. The order has no other meaning. It needs nothing that is
not stored with a block anyway, no clock, and holds across restarts.

What was removed is remembered by content for a while, so a copy from a node that was away is told from a new put.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from struct import Struct

from cache.arena import UNCHECKED
from cache.block import BlockKey
from cache.recent import Recent

Content = tuple[int, int]
"""(checksum, bytes): what tells values of one key apart."""

ROW = Struct("<QI")
KEYS_MAX = 1 << 16
UNDERWAY_S = 60.0  # so long copies that were on their way when a key was removed are not taken
AWAY_S = 600.0  # so long a node may be away and is still told, by whoever heard of it, what was removed


def differ(ours: Content, offered: Content) -> bool:
    """Contents without a checksum are KV (--no-block-checksums): any copy will do."""
    return ours != offered and UNCHECKED not in (ours[0], offered[0])


def stays(ours: Content, offered: Content) -> bool:
    """Of two that differ: whether ours is the one that all replicas keep."""
    return ours < offered


class Removals:
    """What was removed here, lately."""

    def __init__(self) -> None:
        self._keys = Recent(KEYS_MAX, UNDERWAY_S)
        self._contents = Recent(KEYS_MAX, AWAY_S)

    def add(self, now: float, key: BlockKey, content: Content | None) -> None:
        """`content`: what lay here, and is not taken back. Where nothing did, any copy on its way may be of what was
        removed elsewhere."""
        if content is None or content[0] == UNCHECKED:
            self._keys.add(now, key)
        else:
            self._contents.add(now, key + ROW.pack(*content))

    def lately(self, now: float, key: BlockKey) -> bool:
        """Copies of anything under this key may still be on their way."""
        return self._keys.has(now, key)

    def gone(self, now: float, key: BlockKey, content: Content) -> bool:
        """Who still has that content has not heard of its removal."""
        return self._contents.has(now, key + ROW.pack(*content))

    def put_again(self, key: BlockKey, content: Content) -> None:
        """By a client: it is no leftover."""
        self._contents.discard(key + ROW.pack(*content))


class Uneven:
    """Keys of which other homes may have another value than this one, or none: to be offered to them. Oldest go first
    when there are too many: the next change of members offers them again."""

    def __init__(self) -> None:
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self.seen = 0  # contents that differed

    def add(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._keys[key] = None
            if len(self._keys) > KEYS_MAX:
                self._keys.popitem(last=False)

    def take(self) -> list[BlockKey]:
        """All of them; they are the caller's now."""
        taken = list(self._keys)
        self._keys.clear()
        return taken
