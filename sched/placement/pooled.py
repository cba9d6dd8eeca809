"""How much of the pool's prefix is worth a fetch: it may take longer to read from SSD than to compute.

A node computes on from the first token that lies only on SSD, or it waits until all of the prefix is in DRAM. Here the
disk alone is judged; costs.py adds the transfer and judges each node.
"""

from __future__ import annotations

from dataclasses import dataclass

from sched.placement.costs import least_prefill_s
from sched.placement.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledPrefix:
    """Leading tokens of a prompt that the pool has."""

    tokens: int
    dram_tokens: int  # in front of the first that lies on SSD only
    ssd_tokens: int
    ssd_s: float  # until the last of those is in the DRAM of its home

    def worth_fetching(self, view: View) -> PooledPrefix:
        """The whole prefix; or the part in front of the SSD, if the quickest node of `view` computes what follows
        before it is read."""
        behind = self.tokens - self.dram_tokens
        if not self.ssd_tokens or self.ssd_s < least_prefill_s(view, behind, self.dram_tokens):
            return self
        return PooledPrefix(tokens=self.dram_tokens, dram_tokens=self.dram_tokens, ssd_tokens=0, ssd_s=0.0)
