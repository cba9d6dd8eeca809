"""The demands of a request on its nodes, for placement: from the request and the part of its prompt that was found.

Transfers are priced by the bytes that really move, and measured paths are too (the `bytes` of the timeline's
`kv_moved` and `prefix_fetched`). --wire-dtype and --pool-dtype make them fewer than the bytes of the arena; what comes
from the arena of another node is never encoded. A window layer hands over its window, not the whole prompt; a fetch
from the pool is priced without the blocks of windows, a constant.
"""

from __future__ import annotations

from cache.block import BlockGeometry
from cache.results import LeadingRun
from engine.step.request import Request
from sched.placement.demand import Demand
from sched.placement.pooled import PooledPrefix
from sched.placement.view import View


class Demands:
    """Of requests to a cluster whose blocks are of one geometry."""

    def __init__(self, geometry: BlockGeometry) -> None:
        size = self._block_size = geometry.block_size
        self._geometry = geometry
        self._fetch_token_bytes = {"pool": geometry.pool_bytes / size, "arena": geometry.block_bytes / size}

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
        return Demand(
            num_tokens=request.num_tokens,
            max_tokens=request.sampling.max_tokens - request.num_output_tokens,
            pool_tokens=prefix.tokens if from_pool else held_tokens,
            block_size=size,
            handover_token_bytes=self._geometry.handover_blocks(request.num_tokens)
            * self._geometry.wire_bytes
            / max(size, -(-request.num_tokens // size) * size),
            fetch_token_bytes=self._fetch_token_bytes[fetch_from],
            service_class=request.service_class,
            fetch_from=fetch_from,
            ssd_s=prefix.ssd_s if from_pool else 0.0,
            ssd_tokens=prefix.ssd_tokens if from_pool else 0,
            dram_tokens=prefix.dram_tokens if from_pool else 0,
        )
