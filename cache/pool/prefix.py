"""PrefixIndex: maps keys to blocks and finds the longest cached prefix of a prompt. Pure.

Keys are chained (cache/block.py), so a key identifies the whole prompt up to the end of its block. The longest cached
prefix is therefore the leading run of known keys, and the index needs no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cache.block import BlockKey


class PrefixIndex:
    """A one-to-one map of block keys and block ids."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[BlockKey, bool], None]] = []
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._untold: set[BlockKey] = set()

    def watch(self, changed: Callable[[BlockKey, bool], None]) -> None:
        """Call `changed(key, True)` for every key held now, and `changed(key, held)` for each later change."""
        for key in self._blocks:
            if key not in self._untold:
                changed(key, True)
        self._watchers.append(changed)

    def add(self, key: BlockKey, block_id: int, *, told: bool = True) -> None:
        """Record that `block_id` holds `key`; watchers hear of it if `told`. Raises ValueError when either is already
        mapped."""
        if key in self._blocks or block_id in self._keys:
            raise ValueError(f"key {key.hex()} or block {block_id} already has its pair")
        self._blocks[key] = block_id
        self._keys[block_id] = key
        if not told:
            self._untold.add(key)
            return
        for changed in self._watchers:
            changed(key, True)

    def remove(self, block_id: int) -> BlockKey:
        """Forget the pair of `block_id`; returns its key. Raises KeyError when it has none."""
        key = self._keys.pop(block_id)
        del self._blocks[key]
        if key in self._untold:
            self._untold.discard(key)
            return key
        for changed in self._watchers:
            changed(key, False)
        return key

    def block_of(self, key: BlockKey) -> int | None:
        return self._blocks.get(key)

    def key_of(self, block_id: int) -> BlockKey | None:
        return self._keys.get(block_id)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Block ids of the longest leading run of `keys`."""
        run = []
        for key in keys:
            block_id = self._blocks.get(key)
            if block_id is None:
                break
            run.append(block_id)
        return run

    def pairs(self) -> Iterator[tuple[BlockKey, int]]:
        return iter(self._blocks.items())

    def consistent(self) -> bool:
        """Whether both directions of the map agree."""
        return len(self._blocks) == len(self._keys) and all(self._keys.get(b) == k for k, b in self._blocks.items())

    def __len__(self) -> int:
        return len(self._blocks)
