"""Plans requests whose KV exceeds the arena of their node: which blocks lie where, tokens/s, and why it refuses. Pure.

The newest blocks of such a request are *hot*: they lie in the arena. All earlier ones are *cold*: they lie in the
node's share of the pool, as many as possible in its DRAM (*near*), the others on its SSD (*far*). Every step reads each
layer of each of them once: near ones where they lie, far ones through a *window* of a few blocks of the arena, while
the layers before compute (FlexGen, arXiv 2303.06865, section 4.2). On a CPU, hot blocks lie in memory like near ones,
and take as long. So the time of a step is

    seconds of a step    s0 + s1 (hot and near bytes) + s2 (far bytes); s0 has the weights, which every step reads
    seconds of a prompt  the steps as if everything were hot, plus s1 and s2 times the cold bytes of each chunk

The node fits the coefficients to its own steps, first to a few when it starts.
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
    near_blocks: int  # most of them in DRAM
    far_blocks: int = 0  # and on SSD
    held_blocks: int = 0  # and on other nodes (sched/elsewhere.py), behind those in DRAM
    hot_apart: bool = False  # hot blocks lie in much faster memory than near ones: on GPUs, which only the lab has here

    @property
    def arena_blocks(self) -> int:
        """Blocks of the arena that the request takes while it runs."""
        return self.hot_blocks + self.window_blocks

    @property
    def cold_blocks(self) -> int:
        return self.near_blocks + self.held_blocks + self.far_blocks

    @property
    def tokens(self) -> int:
        """Longest prompt + output."""
        return (self.hot_blocks + self.cold_blocks) * self.block_size

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one step: the hot blocks hold them behind a block that is not full."""
        return (self.hot_blocks - 1) * self.block_size

    def cold_of(self, tokens: int) -> int:
        """Cold blocks of a request with this many tokens, at least."""
        return max(0, -(-tokens // self.block_size) - self.hot_blocks)

    def bytes_of(self, tokens: int) -> tuple[int, int]:
        """Its (near, far) bytes."""
        cold = self.cold_of(tokens)
        near = min(cold, self.near_blocks)
        return near * self.block_bytes, max(0, cold - near - self.held_blocks) * self.block_bytes

    def hot_bytes(self, tokens: int) -> int:
        """Of its blocks in the arena, if they are read like near ones."""
        return 0 if self.hot_apart else (-(-tokens // self.block_size) - self.cold_of(tokens)) * self.block_bytes


def room_of(
    arena_blocks: int, near_far: tuple[int, int], block_size: int, block_bytes: int, step_tokens: int
) -> Room | None:
    """`near_far`: blocks of DRAM and SSD for one request; `step_tokens`: the budget of a step. None: the arena is too
    small to read anything into it, or there is no DRAM."""
    most = int(ARENA_SHARE * arena_blocks)
    window = max(1, min(WINDOW_BLOCKS, most // 4)) if near_far[1] else 0
    hot = min(most - window, -(-step_tokens // block_size) + 1)
    if hot < LEAST_HOT or near_far[0] < 1:
        return None
    return Room(block_size, block_bytes, hot, window, *near_far)


class ColdSteps:
    """Seconds of a decode step by its bytes: `near_bytes` in memory, which are near and hot ones, and on SSD. Feed it
    every such step."""

    def __init__(self, step_s: float = 1e-2, near_bytes_s: float = 4e9, far_bytes_s: float = 5e8) -> None:
        """The prior, until the first measurement: seconds, and bytes/s."""
        self.regression = Regression((step_s, 1 / near_bytes_s, 1 / far_bytes_s))

    def observe(self, near_bytes: int, far_bytes: int, seconds: float) -> None:
        self.regression.observe((1.0, float(near_bytes), float(far_bytes)), seconds)

    def token_s(self, near_bytes: int, far_bytes: int) -> float:
        return self.regression.estimate((1.0, float(near_bytes), float(far_bytes)))

    def read_s(self, near_bytes: int, far_bytes: int) -> float:
        """Seconds that these bytes add to a step."""
        _, near_s, far_s = self.regression.coefficients
        return near_s * near_bytes + far_s * far_bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request beyond memory will cost on a node."""

    cold_blocks: int  # at its end
    near_bytes: int  # at the end of the prompt: those that its first tokens read
    far_bytes: int
    token_s: float  # a step of theirs, while nothing else runs
    prompt_s: float  # until the first token

    @property
    def cold_bytes(self) -> int:
        return self.near_bytes + self.far_bytes

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.token_s if self.token_s > 0 else float("inf")


def forecast(prompt: int, output: int, known: int, room: Room, steps: ColdSteps, prefill_s: float) -> Forecast:
    """`prompt`, `output`, `known`: tokens of the prompt, to generate at most, and of the prompt that are in the tier
    already; `prefill_s`: of the rest of the prompt, if everything were hot."""
    near = far = 0
    for begin in range(known, prompt, room.chunk_tokens):
        of_chunk = room.bytes_of(min(prompt, begin + room.chunk_tokens))
        near, far = near + of_chunk[0], far + of_chunk[1]
    cold = room.bytes_of(prompt)
    prompt_s = prefill_s + steps.read_s(near, far)
    token_s = steps.token_s(cold[0] + room.hot_bytes(prompt), cold[1])
    return Forecast(room.cold_of(prompt + output), *cold, token_s, prompt_s)


def no_room(prompt: int, output: int, room: Room, node: str, lent: int = 0) -> str | None:
    """Why the node cannot hold a request of these tokens at any time; None if it can. lent: blocks that other nodes
    hold for it at most."""
    if prompt + output <= room.tokens + lent * room.block_size:
        return None
    near, far, need = room.near_blocks, room.far_blocks, room.cold_of(prompt + output)
    ssd = f", its SSD {far} ({_mb(far * room.block_bytes)})" if far else ""
    ssd += f", and other nodes lend {lent} ({_mb(lent * room.block_bytes)})" if lent else ""
    return (
        f"{prompt} tokens of prompt and {output} to generate need {need} blocks of {room.block_bytes} bytes "
        f"({_mb(need * room.block_bytes)}) beyond the {room.hot_blocks} that the arena of {node} keeps; its DRAM share "
        f"has {near} ({_mb(near * room.block_bytes)}) for one request{ssd}: raise --dram-bytes, or give "
        f"{'a larger --ssd-bytes' if far else '--ssd-path'} there, or ask for less"
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
