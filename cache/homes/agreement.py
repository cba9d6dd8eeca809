"""Decides which of two contents of one key stays. All replicas decide alike without communication. Pure.

A key of KV, or of a part of an object, identifies its content, so every copy is valid. A key chosen by a user does not:
during a partition, two clients may put different values. Then the smaller content stays on all replicas, regardless of
the order in which the contents arrive. The order has no other meaning. It uses only data stored with each block and no
clock, so it holds across restarts.

Removed contents are remembered for a while, to distinguish a copy from a node that was disconnected from a new put.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from struct import Struct

from cache.arena import UNCHECKED
from cache.block import BlockKey
from cache.recent import Recent

Content = tuple[int, int]
"""(checksum, bytes): distinguishes the values of one key."""

ROW = Struct("<QI")
KEYS_MAX = 1 << 16
IN_FLIGHT_S = 60.0  # after a removal, copies that may have been in flight are refused for this long
DISCONNECTED_MAX_S = 600.0  # a node may be disconnected for this long and still learn of removals


def differ(ours: Content, offered: Content) -> bool:
    """Whether two contents differ. Contents without a checksum are KV (--no-block-checksums), where every copy is
    valid."""
    return ours != offered and UNCHECKED not in (ours[0], offered[0])


def stays(ours: Content, offered: Content) -> bool:
    """Whether ours is the one of two differing contents that all replicas keep."""
    return ours < offered


class Removals:
    """The recent removals on this node."""

    def __init__(self) -> None:
        self._keys = Recent(KEYS_MAX, IN_FLIGHT_S)
        self._contents = Recent(KEYS_MAX, DISCONNECTED_MAX_S)

    def add(self, now: float, key: BlockKey, content: Content | None) -> None:
        """Record a removal. `content`: the removed content, which is not accepted again. If there was none, any copy in
        flight may be of a content removed on another node."""
        if content is None or content[0] == UNCHECKED:
            self._keys.add(now, key)
        else:
            self._contents.add(now, key + ROW.pack(*content))

    def lately(self, now: float, key: BlockKey) -> bool:
        """Whether copies of any content of this key may still be in flight."""
        return self._keys.has(now, key)

    def gone(self, now: float, key: BlockKey, content: Content) -> bool:
        """Whether this content was removed, so that a node that still has it missed the removal."""
        return self._contents.has(now, key + ROW.pack(*content))

    def put_again(self, key: BlockKey, content: Content) -> None:
        """A client has put this content again, so it is not a leftover."""
        self._contents.discard(key + ROW.pack(*content))


class Uneven:
    """Keys whose other homes may have a different value or none, and must be offered this one. If there are too many,
    the oldest are dropped: the next change of members offers them again."""

    def __init__(self) -> None:
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self.seen = 0  # number of differing contents

    def add(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._keys[key] = None
            if len(self._keys) > KEYS_MAX:
                self._keys.popitem(last=False)

    def take(self) -> list[BlockKey]:
        """Remove and return all keys."""
        taken = list(self._keys)
        self._keys.clear()
        return taken
