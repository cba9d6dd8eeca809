"""PrefixIndex: maps keys to blocks and finds the longest cached prefix of a prompt. Pure.

Keys are chained (cache/block.py), so a key identifies the whole prompt up to the end of its block. The longest cached
prefix is therefore the leading run of known keys, and the index needs no tree.

In a model whose layers are in groups, the key of a block of another group than 0 says nothing alone: its place counts
once all groups that need a block there have theirs. Watchers that ask for it hear of the place, under one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cache.block import BlockKey


class Place(NamedTuple):
    """The blocks for the same tokens of several groups: known as `name` when all `groups` of them are here."""

    name: BlockKey
    groups: int


class PrefixIndex:
    """A one-to-one map of block keys and block ids."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[BlockKey, bool], None]] = []
        self._of_places: list[Callable[[BlockKey, bool], None]] = []  # those of the watchers that hear of places too
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._places: dict[BlockKey, Place] = {}  # of blocks of other groups than 0
        self._lacking: dict[BlockKey, int] = {}  # by name of a place with a block: how many groups lack theirs

    def watch(self, changed: Callable[[BlockKey, bool], None], *, places: bool = False) -> None:
        """Call `changed(key, True)` for every key held now, and `changed(key, held)` for each later change: of blocks
        of group 0, and if `places` of complete places of the other groups, by their names."""
        for key in self._blocks:
            if key not in self._places:
                changed(key, True)
        self._watchers.append(changed)
        if places:
            for name, lacking in self._lacking.items():
                if not lacking:
                    changed(name, True)
            self._of_places.append(changed)

    def add(self, key: BlockKey, block_id: int, place: Place | None = None) -> None:
        """Record that `block_id` holds `key`; `place`: of a block of another group than 0. Raises ValueError when
        either is already mapped."""
        if key in self._blocks or block_id in self._keys:
            raise ValueError(f"key {key.hex()} or block {block_id} already has its pair")
        self._blocks[key] = block_id
        self._keys[block_id] = key
        if place is None:
            for changed in self._watchers:
                changed(key, True)
            return
        self._places[key] = place
        lacking = self._lacking[place.name] = self._lacking.get(place.name, place.groups) - 1
        if not lacking:
            for changed in self._of_places:
                changed(place.name, True)

    def remove(self, block_id: int) -> BlockKey:
        """Forget the pair of `block_id`; returns its key. Raises KeyError when it has none."""
        key = self._keys.pop(block_id)
        del self._blocks[key]
        place = self._places.pop(key, None)
        if place is None:
            for changed in self._watchers:
                changed(key, False)
            return key
        lacking = self._lacking[place.name] = self._lacking[place.name] + 1
        if lacking == 1:
            for changed in self._of_places:
                changed(place.name, False)
        if lacking == place.groups:
            del self._lacking[place.name]
        return key

    def move(self, key: BlockKey, block_id: int) -> int:
        """Another block holds `key` from now on; returns the one before. No watcher hears of it: the key was here and
        stays. Raises KeyError for an unknown key, ValueError when the block has one."""
        if block_id in self._keys:
            raise ValueError(f"block {block_id} already has a key")
        before = self._blocks[key]
        del self._keys[before]
        self._blocks[key], self._keys[block_id] = block_id, key
        return before

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
