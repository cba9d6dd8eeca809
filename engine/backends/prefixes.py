"""The prefixes that one worker holds, from its KV events. Pure.

A worker hashes blocks in its own way. Its events name the tokens of each block and the block before it, so this index
computes our keys of the same blocks, and a prompt is looked up by our keys. Blocks whose beginning is unknown (their
first blocks were told before the subscription, or depend on an adapter or an image) are left out: the index may miss a
prefix, but it never believes one that was not told.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cache.block import BlockKey
from cache.keys import chain
from net.kv_events.wire import ARENA, AllBlocksCleared, Batch, BlockHash, BlockRemoved, BlockStored

FIRST_GROUP = (None, 0)
"""Of a model with several groups of layers, the first group decides."""

SALT = re.compile("[0-9a-f]{32}")
"""A salt that a request of ours carries to its worker: the salted root of its keys."""


class Prefixes:
    """Of one worker. `root`: of our keys without a salt."""

    def __init__(self, root: BlockKey) -> None:
        self._root = root
        self.block_size = 0  # tokens; 0: no block was told yet
        self._key_of: dict[BlockHash, BlockKey] = {}
        self._held: Counter[BlockKey] = Counter()  # two hashes can name the same tokens

    def __len__(self) -> int:
        """Blocks."""
        return len(self._held)

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved(hashes, medium, group):
                    if medium in (None, ARENA) and group in FIRST_GROUP:
                        for one in hashes:
                            self._remove(one)
                case AllBlocksCleared():
                    self.forget()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._key_of.clear()
        self._held.clear()

    def matched_tokens(self, keys: Sequence[BlockKey]) -> int:
        """Leading tokens that the worker holds, of a prompt with these keys of blocks of `block_size`."""
        held = self._held
        depth = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        return depth * self.block_size

    def _stored(self, event: BlockStored) -> None:
        if event.medium not in (None, ARENA) or event.group_idx not in FIRST_GROUP or event.lora_id is not None:
            return
        if event.block_size != self.block_size:
            self.forget()
            self.block_size = event.block_size
        extra = event.extra_keys or [None] * len(event.block_hashes)
        parent = event.parent_block_hash
        before = self._first(extra[0]) if parent is None else self._key_of.get(parent)
        own = [one for at, one in enumerate(extra) if one and (at or parent is not None)]
        tokens = event.token_ids
        if before is None or own or len(tokens) != event.block_size * len(event.block_hashes):
            return
        keys = chain(before, array("I", tokens), event.block_size)
        for name, key in zip(event.block_hashes, keys, strict=True):
            if name not in self._key_of:
                self._key_of[name] = key
                self._held[key] += 1

    def _first(self, extra: list[Any] | None) -> BlockKey | None:
        """What a prompt's first key follows, given what else than tokens its hash depends on. None: not one of ours."""
        if not extra:
            return self._root
        salted = len(extra) == 1 and isinstance(extra[0], str) and SALT.fullmatch(extra[0])
        return bytes.fromhex(extra[0]) if salted else None

    def _remove(self, name: BlockHash) -> None:
        key = self._key_of.pop(name, None)
        if key is not None:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
