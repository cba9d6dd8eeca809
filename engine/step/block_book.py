"""Which blocks of the pool each request holds. Pure.

The one place where requests take references on blocks and give them back: the longest cached prefix first, fresh
blocks as tokens are computed, names for the blocks that became full, everything back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.block import BlockKey
from cache.pool.block_pool import BlockPool, OutOfBlocks
from cache.pool.policy import Facts
from engine.step.request import Request


class BlockBook:
    """Keeps `block_ids`, `num_computed` and `num_named` of requests in step with the pool."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_caching: bool = True,
        recompute_s: Callable[[int, int], float] = lambda tokens, context: 1.0,
    ) -> None:
        """recompute_s(tokens, context): seconds to compute so many tokens behind so many others."""
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._recompute_s = recompute_s

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- taking

    def match(self, request: Request) -> list[int]:
        """Longest prefix in the pool. The last known token is never taken from it: its logits are needed."""
        if not self.prefix_caching:
            return []
        keys = request.block_keys(self.block_size)
        return self.pool.match(keys[: (request.num_tokens - 1) // self.block_size])

    def adopt_prefix(self, request: Request) -> int:
        """Take references on the longest prefix in this pool, or on what has joined it since the last call; returns the
        request's blocks. Only before its first step."""
        held = len(request.block_ids)
        if (
            self.prefix_caching and not request.scores_prompt and request.num_named == held
        ):  # what is still arriving has no names
            keys = request.block_keys(self.block_size)
            if more := self.pool.match(keys[held : (request.num_tokens - 1) // self.block_size]):
                self.pool.acquire(more)
                request.block_ids = request.block_ids + more
                request.num_named = len(request.block_ids)
                request.num_computed = request.num_named * self.block_size
        return len(request.block_ids)

    def _reuses(self, request: Request) -> bool:
        """A prompt whose own log probabilities are asked for is computed whole."""
        return self.prefix_caching and not request.scores_prompt

    def computes_next(self, request: Request, other: Request) -> bool:
        """Whether `other`, a prompt that is being computed, has yet to compute the block that `request` needs next."""
        position = len(request.block_ids)
        if not self._reuses(request) or position >= (request.num_tokens - 1) // self.block_size:
            return False
        if not other.num_computed // self.block_size <= position < other.num_tokens // self.block_size:
            return False
        return request.block_keys(self.block_size)[position] == other.block_keys(self.block_size)[position]

    def adopt_loaded(self, request: Request, block_ids: Sequence[int]) -> None:
        """Append blocks that hold the next part of the prefix; the request takes over their references."""
        request.block_ids.extend(block_ids)
        request.num_computed = len(request.block_ids) * self.block_size
        self.name_full(request)

    def adopt_arriving(self, request: Request, block_ids: Sequence[int]) -> None:
        """The same before they have arrived. They have no names until `name_full`, which must wait for their end."""
        request.block_ids.extend(block_ids)
        request.num_computed = len(request.block_ids) * self.block_size

    def take_all(self, request: Request) -> int:
        """Blocks for all known tokens of a request that has none: n from the cache, the rest fresh; returns n.
        Raises OutOfBlocks, and then nothing has changed."""
        matched = self.match(request)
        self.pool.acquire(matched)
        try:
            fresh = self.pool.allocate(self.blocks_for(request.num_tokens) - len(matched))
        except OutOfBlocks:
            self.pool.release(matched)
            raise
        request.block_ids = matched + fresh
        request.num_named = len(matched)
        return len(matched)

    def lacks(self, request: Request) -> int:
        """Blocks that the known tokens of the request still need."""
        return self.blocks_for(request.num_tokens) - len(request.block_ids)

    def extend(self, request: Request, count: int) -> None:
        """Blocks for `count` more computed tokens. Raises OutOfBlocks, and then nothing has changed."""
        need = self.blocks_for(request.num_computed + count) - len(request.block_ids)
        if need > 0:
            request.block_ids += self.pool.allocate(need)

    # --- naming

    def name_full(self, request: Request) -> list[tuple[BlockKey, int, Facts]]:
        """Name the blocks that became full, so that they can be reused; returns (key, block id, what eviction may want
        to know) of those that were not known under another block."""
        full = request.num_computed // self.block_size
        if not self.prefix_caching or full <= request.num_named:
            return []
        full_blocks = self.named(request, request.num_named, full)
        request.num_named = full
        return [block for block in full_blocks if self.pool.name(block[1], block[0], block[2])]

    def named(self, request: Request, first: int, end: int) -> list[tuple[BlockKey, int, Facts]]:
        """The request's blocks from `first` up to `end`: (key, block id, what eviction may want to know)."""
        keys = request.block_keys(self.block_size)
        return [(keys[i], request.block_ids[i], self.facts(request, i)) for i in range(first, end)]

    def facts(self, request: Request, position: int) -> Facts:
        """Of the request's block at `position`."""
        cost_s = self._recompute_s(self.block_size, position * self.block_size)
        return Facts(position, cost_s, request.service_class)

    # --- giving back

    def release(self, request: Request) -> None:
        """Everything back; what was named stays findable until it is evicted."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        request.num_named = 0
