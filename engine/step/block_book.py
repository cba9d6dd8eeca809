"""Keeps track of the pool blocks that each request holds. Pure.

Only this class takes and releases block references for requests: first on the longest cached prefix, then on fresh
blocks as tokens are computed. It names blocks when they become full and releases all blocks at the end.
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
        """recompute_s(tokens, context): seconds to compute `tokens` tokens after `context` others."""
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.changes = 0  # of num_computed by this class
        self._recompute_s = recompute_s
        self._named: Callable[[Request, Sequence[int]], None] | None = None

    def watch(self, named: Callable[[Request, Sequence[int]], None]) -> None:
        """Call `named(request, positions)` when blocks of a request at these positions become reusable."""
        self._named = named

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- taking

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest prefix in the pool, without the last known token, whose logits are needed."""
        if not self.prefix_caching:
            return []
        keys = request.block_keys(self.block_size)
        return self.pool.match(keys[: (request.num_tokens - 1) // self.block_size])

    def adopt_prefix(self, request: Request) -> int:
        """Take references on the longest prefix in this pool, or extend it since the last call. Returns the number of
        blocks that the request holds. Call it only before the request's first step."""
        assert not request.finished, "only unfinished requests give their blocks back"
        held = len(request.block_ids)
        if (
            self.prefix_caching and not request.scores_prompt and request.num_named == held
        ):  # blocks that are still arriving have no names
            keys = request.block_keys(self.block_size)
            if more := self.pool.match(keys[held : (request.num_tokens - 1) // self.block_size]):
                self.pool.acquire(more)
                request.block_ids = request.block_ids + more
                request.num_named = len(request.block_ids)
                request.num_computed = request.num_named * self.block_size
                self.changes += 1
        return len(request.block_ids)

    def _reuses(self, request: Request) -> bool:
        """Whether the request may use cached blocks. A prompt with prompt log probabilities is computed in full."""
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
        self.adopt_arriving(request, block_ids)
        self.name_full(request)

    def adopt_arriving(self, request: Request, block_ids: Sequence[int]) -> None:
        """Append blocks that are still arriving. Call `name_full`, which names them, only after they have arrived."""
        assert not request.finished, "only unfinished requests give their blocks back"
        request.block_ids.extend(block_ids)
        request.num_computed = len(request.block_ids) * self.block_size
        self.changes += 1

    def take_all(self, request: Request) -> int:
        """Take blocks for all known tokens of a request that has none: n cached blocks, then fresh ones. Returns n.
        Raises OutOfBlocks and then changes nothing."""
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
        """Number of blocks that the known tokens of the request still need."""
        return self.blocks_for(request.num_tokens) - len(request.block_ids)

    def extend(self, request: Request, count: int) -> None:
        """Take blocks for `count` more computed tokens. Raises OutOfBlocks and then changes nothing."""
        need = self.blocks_for(request.num_computed + count) - len(request.block_ids)
        if need > 0:
            request.block_ids += self.pool.allocate(need)

    # --- naming

    def name_full(self, request: Request) -> list[tuple[BlockKey, int, Facts]]:
        """Name the blocks that became full, so that they can be reused. Returns (key, block id, facts for eviction) of
        those whose key no other block has."""
        full = request.num_computed // self.block_size
        if not self.prefix_caching or request.private or full <= request.num_named:
            return []
        first = request.num_named
        full_blocks = self.named(request, first, full)
        request.num_named = full
        fresh = [i for i, (key, block_id, facts) in enumerate(full_blocks) if self.pool.name(block_id, key, facts)]
        if self._named is not None and fresh:
            self._named(request, [first + i for i in fresh])
        return [full_blocks[i] for i in fresh]

    def named(self, request: Request, first: int, end: int) -> list[tuple[BlockKey, int, Facts]]:
        """(key, block id, facts for eviction) of the request's blocks [first, end)."""
        keys = request.block_keys(self.block_size)
        return [(keys[i], request.block_ids[i], self.facts(request, i)) for i in range(first, end)]

    def facts(self, request: Request, position: int) -> Facts:
        """Facts for eviction about the request's block at `position`."""
        cost_s = self._recompute_s(self.block_size, position * self.block_size)
        return Facts(position, cost_s, request.service_class)

    # --- giving back

    def release(self, request: Request) -> None:
        """Release all blocks. Named blocks can still be found until they are evicted."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        request.num_named = 0
        self.changes += 1
