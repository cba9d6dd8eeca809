"""The demands of a request on its nodes, for placement: from the request and the part of its prompt that was found.

Transfers are priced by the bytes that really move, and measured paths are too (the `bytes` of the timeline's
`kv_moved` and `prefix_fetched`). --wire-dtype and --pool-dtype make them fewer than the bytes of the arena; what comes
from the arena of another node is never encoded. A window layer hands over its window, not the whole prompt, and a layer
with a state its state; so does a fetch. The blocks that a request needs of a decode node's arena are those of all
groups, as are the free blocks that nodes report.
"""

from __future__ import annotations

from cache.block import BlockGeometry
from cache.results import LeadingRun
from engine.step.request import Request
from sched.placement.demand import MAX_OUTPUT_TOKENS, Demand
from sched.placement.pooled import PooledPrefix
from sched.placement.view import View


class Demands:
    """Of requests to a cluster whose blocks are of one geometry."""

    def __init__(self, geometry: BlockGeometry) -> None:
        self._block_size = geometry.block_size
        self._geometry = geometry
        self._fetch_block_bytes = {"pool": geometry.pool_bytes, "arena": geometry.block_bytes}

    def of(self, request: Request, pooled: LeadingRun, held_tokens: int, view: View) -> Demand:
        """held_tokens: of the prompt in the arena that has most of it, from where other nodes can fetch them. What lies
        on SSD of the pool counts unless computing it from there on is quicker than reading it."""
        size = self._block_size
        prefix = PooledPrefix(
            tokens=pooled.blocks * size,
            dram_tokens=pooled.dram_blocks * size,
            ssd_tokens=pooled.ssd_blocks * size,
            ssd_s=pooled.ssd_s,
        ).worth_fetching(view)
        fetch_from = "arena" if held_tokens > prefix.tokens else "pool"
        from_pool = fetch_from == "pool"
        pool_tokens = prefix.tokens if from_pool else held_tokens
        fetched = max(1, pool_tokens // size)
        max_tokens = request.sampling.max_tokens - request.num_output_tokens
        longest = request.num_tokens + min(max_tokens, MAX_OUTPUT_TOKENS)
        return Demand(
            num_tokens=request.num_tokens,
            max_tokens=max_tokens,
            pool_tokens=pool_tokens,
            block_size=size,
            handover_token_bytes=self._geometry.handover_blocks(request.num_tokens)
            * self._geometry.wire_bytes
            / max(size, -(-request.num_tokens // size) * size),
            fetch_token_bytes=self._fetch_block_bytes[fetch_from]
            * (1 + self._geometry.others_fetched(0, fetched) / fetched)
            / size,
            other_blocks=self._geometry.handover_blocks(longest) - -(-longest // size),
            service_class=request.service_class,
            fetch_from=fetch_from,
            ssd_s=prefix.ssd_s if from_pool else 0.0,
            ssd_tokens=prefix.ssd_tokens if from_pool else 0,
            dram_tokens=prefix.dram_tokens if from_pool else 0,
        )
