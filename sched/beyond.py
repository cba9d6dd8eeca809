"""Plans requests whose KV exceeds the arena of their node: which blocks lie where, tokens/s, and why it refuses. Pure.

The newest blocks of such a request are *hot*: they lie in the arena. All earlier ones are *cold*: they lie in the DRAM
of the node's share of the pool, and every step reads each layer of each of them once, through a *window* of a few
blocks of the arena. Reading goes on while the layers compute, so a step takes about the longer of the two (FlexGen,
arXiv 2303.06865, section 4.2). Both grow with the cold bytes:

    seconds per token    s0 + s1 (cold bytes)
    seconds of a prompt  the steps as if everything were hot, plus s1 (cold bytes of each chunk)

The node fits s0 and s1 to its own steps, first to a few when it starts. 1 / s1 is at most the bandwidth of the tier.
"""

from __future__ import annotations

from dataclasses import dataclass

from sched.cost import Regression

WINDOW_BLOCKS = 12
"""Blocks of the arena to read cold blocks into; each has room for one layer of as many blocks as the model has layers.
A third of them is computed with while the others are filled."""

ARENA_SHARE = 0.5
"""Maximum share of the arena for hot blocks and window; the rest goes on serving other requests."""

LEAST_HOT = 2
"""The block that is being filled, and one for a chunk."""

MB = 1e6


@dataclass(frozen=True, slots=True)
class Room:
    """What one request beyond memory gets on a node, in blocks."""

    block_size: int  # tokens
    block_bytes: int
    hot_blocks: int
    window_blocks: int
    cold_blocks: int  # most of them

    @property
    def arena_blocks(self) -> int:
        """Blocks of the arena that the request takes while it runs."""
        return self.hot_blocks + self.window_blocks

    @property
    def tokens(self) -> int:
        """Longest prompt + output."""
        return (self.hot_blocks + self.cold_blocks) * self.block_size

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one step: the hot blocks hold them behind a block that is not full."""
        return (self.hot_blocks - 1) * self.block_size

    def cold_of(self, tokens: int) -> int:
        """Cold blocks of a request with so many tokens, at least."""
        return max(0, -(-tokens // self.block_size) - self.hot_blocks)


def room_of(arena_blocks: int, cold_blocks: int, block_size: int, block_bytes: int, step_tokens: int) -> Room | None:
    """`cold_blocks`: of the tier, for one request; `step_tokens`: the budget of a step. None: the arena is too small
    to read anything into it."""
    most = int(ARENA_SHARE * arena_blocks)
    window = max(1, min(WINDOW_BLOCKS, most // 4))
    hot = min(most - window, -(-step_tokens // block_size) + 1)
    if hot < LEAST_HOT or cold_blocks < 1:
        return None
    return Room(block_size, block_bytes, hot, window, cold_blocks)


class ColdSteps:
    """Seconds of a decode step by its cold bytes. Feed it every such step."""

    def __init__(self, step_s: float = 1e-2, bytes_per_s: float = 4e9) -> None:
        """The prior, until the first measurement."""
        self.regression = Regression((step_s, 1 / bytes_per_s))

    def observe(self, cold_bytes: int, seconds: float) -> None:
        self.regression.observe((1.0, float(cold_bytes)), seconds)

    def token_s(self, cold_bytes: int) -> float:
        return self.regression.estimate((1.0, float(cold_bytes)))

    @property
    def byte_s(self) -> float:
        """Seconds that each cold byte adds to a step."""
        return self.regression.coefficients[1]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request beyond memory will cost on a node."""

    cold_blocks: int  # at its end
    cold_bytes: int  # at the end of the prompt: those that its first tokens read
    token_s: float  # for each of them, while nothing else runs
    prompt_s: float  # until the first token

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.token_s if self.token_s > 0 else float("inf")


def forecast(prompt: int, output: int, known: int, room: Room, steps: ColdSteps, prefill_s: float) -> Forecast:
    """`prompt`, `output`, `known`: tokens of the prompt, to generate at most, and of the prompt that are in the tier
    already; `prefill_s`: of the rest of the prompt, if everything were hot."""
    chunk, read = room.chunk_tokens, 0
    for begin in range(known, prompt, chunk):
        read += room.cold_of(min(prompt, begin + chunk)) * room.block_bytes
    cold_bytes = room.cold_of(prompt) * room.block_bytes
    return Forecast(
        room.cold_of(prompt + output),
        cold_bytes,
        steps.token_s(cold_bytes),
        prefill_s + steps.byte_s * read,
    )


def no_room(prompt: int, output: int, room: Room, node: str) -> str | None:
    """Why the node cannot hold a request of these tokens at any time; None if it can."""
    if prompt + output <= room.tokens:
        return None
    blocks, need = room.cold_blocks, room.cold_of(prompt + output)
    return (
        f"{prompt} tokens of prompt and {output} to generate need {need} blocks of {room.block_bytes} bytes "
        f"({_mb(need * room.block_bytes)}) beyond the {room.hot_blocks} that the arena of {node} keeps; its DRAM share "
        f"has {blocks} ({_mb(blocks * room.block_bytes)}) for one request: raise --dram-bytes or --kv-cache-bytes "
        "there, or ask for less"
    )


def too_slow(found: Forecast, service_class: str, tbt_s: float, node: str) -> str | None:
    """Why the objective of the class cannot bear the request; None if it can."""
    if found.token_s <= tbt_s:
        return None
    return (
        f"each token would read {_mb(found.cold_bytes)} beyond the arena of {node} and take {found.token_s:.3g} s "
        f"({found.tokens_per_s:.3g} tokens/s), and class {service_class} has an objective of {tbt_s:g} s (--slo): send "
        "it with a class that may take longer, raise that objective, or give --kv-cache-bytes more"
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / MB:.3g} MB" if nbytes < 1000 * MB else f"{nbytes / MB / 1000:.3g} GB"
