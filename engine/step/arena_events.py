"""From changes of the arena to KV events. Pure.

The hash of a block is the last 8 bytes of its key as a number: indexers of others keep hashes of 64 bits. A block of a
request with a cache salt names the salted root as an extra key of its first block, so that it is not taken for a block
of the same tokens without salt. The salt itself is not on this node. So does a request that still runs on weights that
have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.block import BlockKey
from engine.step.request import Request
from net.kv_events.wire import ARENA, AllBlocksCleared, BlockRemoved, BlockStored, Event

GROUP = 0
"""The full group; blocks of further groups are not told (docs/connect/events.md)."""

KINDS = {"full": "full_attention", "latent": "mla_attention"}
"""Kinds of KV (cache/block.py) -> their names in vLLM."""


def hash_of(key: BlockKey) -> int:
    return int.from_bytes(key[-8:], "big")


class ArenaEvents:
    """`send` gets events in the order of the changes."""

    def __init__(
        self, block_size: int, root: BlockKey, send: Callable[[Sequence[Event]], None], kind: str = "full"
    ) -> None:
        """root: of requests without a cache salt, with the weights that the cluster serves; kind: a key of KINDS."""
        self._block_size, self._root, self._send, self._kind = block_size, root, send, KINDS[kind]

    def named(self, request: Request, positions: Sequence[int]) -> None:
        """Blocks of the request at these positions, ascending, became reusable."""
        self._send([self._stored(request, first, end) for first, end in runs(positions)])

    def _stored(self, request: Request, first: int, end: int) -> BlockStored:
        size = self._block_size
        keys = request.block_keys(size)
        extra: list[list[str] | None] | None = None
        if first == 0 and request.key_root != self._root:
            extra = [[request.key_root.hex()], *[None] * (end - 1)]
        return BlockStored(
            block_hashes=[hash_of(key) for key in keys[first:end]],
            parent_block_hash=hash_of(keys[first - 1]) if first else None,
            token_ids=request.token_ids[first * size : end * size],
            block_size=size,
            lora_id=None,
            medium=ARENA,
            lora_name=None,
            extra_keys=extra,
            group_idx=GROUP,
            kv_cache_spec_kind=self._kind,
        )

    def changed(self, key: BlockKey, held: bool) -> None:
        """The arena holds the key now, or does not any more. `named` tells what it holds."""
        if not held:
            self._send([BlockRemoved([hash_of(key)], ARENA, GROUP)])

    def renewed(self, root: BlockKey) -> None:
        """The cluster serves other weights: no new request finds what the arena holds."""
        self._root = root
        self.cleared()

    def cleared(self) -> None:
        """The arena holds no key that a new request could have."""
        self._send([AllBlocksCleared()])


def runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """[first, end) of the runs of consecutive numbers in an ascending sequence."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = found[-1][0], position + 1
        else:
            found.append((position, position + 1))
    return found
