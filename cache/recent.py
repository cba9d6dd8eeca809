"""Recent: a bounded memory of keys. Pure."""

from __future__ import annotations

from collections import OrderedDict

from cache.block import BlockKey


class Recent:
    """The keys of the last `most` calls of `add`, each for `seconds`."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._until: OrderedDict[BlockKey, float] = OrderedDict()

    def add(self, now: float, key: BlockKey) -> None:
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > self._most:
            self._until.popitem(last=False)

    def has(self, now: float, key: BlockKey) -> bool:
        until = self._until.get(key)
        if until is not None and until < now:
            del self._until[key]
            return False
        return until is not None

    def any(self, now: float) -> bool:
        """Whether any key is remembered."""
        while self._until and next(iter(self._until.values())) < now:
            self._until.popitem(last=False)
        return bool(self._until)

    def discard(self, key: BlockKey) -> None:
        self._until.pop(key, None)
