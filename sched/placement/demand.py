"""The demands of a request on its prefill node and its decode node."""

from __future__ import annotations

from dataclasses import dataclass

MAX_OUTPUT_TOKENS = 256
"""Upper bound of the output length in decode estimates, because max_tokens is a limit and not a forecast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One request."""

    num_tokens: int  # of the prompt
    max_tokens: int  # of the output
    pool_tokens: int  # leading tokens that can be fetched from `fetch_from`
    block_size: int  # tokens
    handover_token_bytes: float  # that move per token from the prefill node to the decode node
    fetch_token_bytes: float  # that move per token from where `fetch_from` says
    other_blocks: int = 0  # of other groups than the first, at the end of the expected output
    service_class: str = "standard"
    fetch_from: str = "pool"  # "pool": the pooled store; "arena": another node's arena
    ssd_s: float = 0.0  # seconds to read the part on SSD into the DRAM of its homes
    ssd_tokens: int = 0  # number of leading tokens on SSD
    dram_tokens: int = 0  # of the pool's, if some are on SSD: those in front of the first of these

    @property
    def usable_tokens(self) -> int:
        """Longest reusable prefix: whole blocks, with at least one token left to compute."""
        return (self.num_tokens - 1) // self.block_size * self.block_size

    @property
    def pooled_tokens(self) -> int:
        """The reusable part of the pool's prefix."""
        return min(self.pool_tokens // self.block_size * self.block_size, self.usable_tokens)

    @property
    def near_tokens(self) -> int:
        """The reusable part in front of the first token on SSD."""
        return min(self.dram_tokens // self.block_size * self.block_size, self.pooled_tokens)

    @property
    def num_blocks(self) -> int:
        """KV blocks of all groups at the end of the expected output."""
        return -(-(self.num_tokens + min(self.max_tokens, MAX_OUTPUT_TOKENS)) // self.block_size) + self.other_blocks

    @property
    def output_tokens(self) -> int:
        return min(self.max_tokens, MAX_OUTPUT_TOKENS)

    @property
    def handover_bytes(self) -> float:
        """Bytes that a hand-over moves."""
        return self.num_tokens * self.handover_token_bytes
