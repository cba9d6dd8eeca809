"""Step times and KV sizes: presets by formula, or coefficients fitted to a recorded run.

    prefill chunk   t = a0 + a1 n + a2 n (n + 2 ctx)     n new tokens after ctx known ones (sched.cost)
    decode step     t = max(w, p B) + d0 + d1 B + k sum(ctx)
    both in one     t = c0 + c1 B + c2 sum(ctx) + c3 n + c4 n (n + 2 ctx)      if it was measured (sched.step_cost)

w: weights read once per step; p: products of one token; k: KV read per token of context. For fixed B the time of a
decode step is linear in the context, so the simulator skips the steps between two changes of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache.groups import Groups

Chunk = tuple[int, int]
"""(new tokens of a prompt, known ones before them)"""


@dataclass(frozen=True, slots=True)
class StepModel:
    """The step times of one node. Seconds, tokens, bytes."""

    name: str
    prefill: tuple[float, float, float]  # a0, a1, a2
    decode: tuple[float, float, float, float, float]  # w, p, d0, d1, k
    token_bytes: int  # KV of one token
    kv_tokens: int  # KV memory of one node
    chunk_tokens: int  # of a prompt in one step
    nic_bytes_s: float  # each way
    nic_latency_s: float = 20e-6
    ssd_bytes_s: float = 3e9
    ssd_iops: float = 5e5
    max_batch: int = 256
    mixed: tuple[float, float, float, float, float] | None = None  # c0 .. c4, if such steps were measured
    front_s: float = 0.0  # from the client to a node's queue, and the first token back
    handover_s: float = 0.0  # from the last byte of a prompt's KV to the decode node's batch
    kv: Groups | None = None  # None: one full group of token_bytes
    expert_s: float = 0.0  # of w: the weights of all routed experts
    expert_share: float = 0.0  # of the routed experts, those of one token
    draft_size: float = 0.0  # of a draft model, over the target's; 0: none
    draft_tokens: float = 0.0  # of prompts, whose draft KV a decode node computes in each step

    def prefill_s(self, new: int, context: int) -> float:
        return self.chunks_s([(new, context)])

    def chunks_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a step with chunks of one or several prompts."""
        a0, a1, a2 = self.prefill
        if self.kv is not None:
            pairs = sum(new * (new + 2 * context) for new, context in chunks)
            return a0 + self._products_s(sum(new for new, _ in chunks)) + a2 * pairs
        return a0 + sum(a1 * new + a2 * new * (new + 2 * context) for new, context in chunks)

    def prompt_s(self, new: int, context: int) -> float:
        """Seconds of all chunks of a prompt."""
        a0, a1, a2 = self.prefill
        chunks = max(1, -(-new // self.chunk_tokens))
        if self.kv is not None:
            last = new - (chunks - 1) * self.chunk_tokens
            products_s = (chunks - 1) * self._products_s(self.chunk_tokens) + self._products_s(last)
            return chunks * a0 + products_s + a2 * new * (new + 2 * context)
        return chunks * a0 + a1 * new + a2 * new * (new + 2 * context)

    def draft_token_s(self, prompt: int) -> float:
        """Seconds in which the draft model computes one token of a prompt of `prompt` tokens, on average."""
        _, a1, a2 = self.prefill
        return self.draft_size * (a1 + a2 * prompt)

    def _products_s(self, tokens: float) -> float:
        """Seconds of the products of a step with `tokens` tokens of prompts; at least the read of their weights."""
        return max(self.read_s(tokens), self.prefill[1] * tokens)

    def read_s(self, tokens: float) -> float:
        """Seconds to read the weights that `tokens` tokens use. Each token uses experts of its own choice."""
        unread: float = (1 - self.expert_share) ** tokens
        return self.decode[0] - self.expert_s * unread

    def decode_line(self, batch: float) -> tuple[float, float]:
        """(seconds, seconds per token of summed context) of a step."""
        _, p, d0, d1, k = self.decode
        return max(self.read_s(batch), p * batch) + d0 + d1 * batch, k

    def decode_s(self, batch: int, context: int) -> float:
        base, slope = self.decode_line(batch)
        return base + slope * context

    def mixed_s(self, chunks: Sequence[Chunk], batch: int, batch_context: int) -> float:
        """Seconds of a step with chunks and decodes: as measured; otherwise weights are read once, and products and
        attention add up."""
        new = sum(n for n, _ in chunks)
        pairs = sum(n * (n + 2 * context) for n, context in chunks)
        if self.mixed is not None:
            c0, c1, c2, c3, c4 = self.mixed
            read = batch_context + sum(context for _, context in chunks)
            return c0 + c1 * batch + c2 * read + c3 * new + c4 * pairs
        _, p, d0, d1, k = self.decode
        a0, a1, a2 = self.prefill
        return (
            max(a0, d0)
            + max(self.read_s(new + batch), a1 * new + p * batch)
            + a2 * pairs
            + d1 * batch
            + k * batch_context
        )

    def faster(self, speed: float) -> StepModel:
        """A node whose steps are `speed` times as fast, with the same memory and network."""
        a0, a1, a2 = (a / speed for a in self.prefill)
        w, p, d0, d1, k = (d / speed for d in self.decode)
        mixed = self.mixed
        if mixed is not None:
            c0, c1, c2, c3, c4 = (c / speed for c in mixed)
            mixed = c0, c1, c2, c3, c4
        expert_s = self.expert_s / speed
        return replace(self, prefill=(a0, a1, a2), decode=(w, p, d0, d1, k), mixed=mixed, expert_s=expert_s)

    # --- KV: of one full group, or of all groups of `kv`; counted in tokens, not in whole blocks

    def held_tokens(self, tokens: int) -> int:
        """KV memory of a request with `tokens` tokens, in units of token_bytes."""
        return tokens if self.kv is None else -(-self.kv.held_bytes(tokens, 1) // self.token_bytes)

    @property
    def fixed_tokens(self) -> int:
        """The largest part of held_tokens that does not grow with a request: full windows and states."""
        return 0 if self.kv is None else -(-self.kv.fixed_bytes // self.token_bytes)

    def handover_bytes(self, tokens: int) -> int:
        """Bytes that move to a decode node with a prompt of `tokens` tokens."""
        return tokens * self.token_bytes if self.kv is None else self.kv.held_bytes(tokens, 1)

    def fetch_bytes(self, tokens: int, known: int = 0) -> int:
        """Bytes that move to a node that has the first `known` tokens, for a pooled prefix of `tokens` tokens."""
        return (tokens - known) * self.token_bytes if self.kv is None else self.kv.fetched_bytes(tokens, known, 1)

    def reused(self, found: int, block_tokens: int) -> int:
        """The tokens that a prompt need not compute, if its first `found` tokens are found in whole blocks."""
        return found if self.kv is None else self.kv.border(found, block_tokens)

    def block_bytes(self, block_tokens: int) -> float:
        """Mean bytes of a block in the pool."""
        return block_tokens * self.token_bytes if self.kv is None else self.kv.block_bytes(block_tokens)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The rates that one node's GPUs reach together, not their nominal ones."""

    flops: float
    hbm_bytes_s: float
    memory_bytes: float
    nic_bytes_s: float
    overhead_s: float = 2e-3  # per step: launches, scheduling, collectives


@dataclass(frozen=True, slots=True)
class Geometry:
    """A dense decoder with 16-bit weights and KV."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_size: int

    @property
    def token_bytes(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


def roofline(name: str, model: Geometry, hardware: Hardware, chunk_tokens: int = 8192) -> StepModel:
    """Products at `flops`, weights and KV at `hbm_bytes_s`; causal attention is 2 l d n (n + 2 ctx) FLOPs."""
    a1 = 2 * model.parameters / hardware.flops
    a2 = 2 * model.layers * model.hidden / hardware.flops
    weights = 2 * model.parameters
    room = hardware.memory_bytes - weights
    if room <= 0:
        raise ValueError(
            f"{name}: {weights / 1e9:.0f} GB of weights do not fit into {hardware.memory_bytes / 1e9:.0f} GB"
        )
    return StepModel(
        name=name,
        prefill=(hardware.overhead_s, a1, a2),
        decode=(weights / hardware.hbm_bytes_s, a1, hardware.overhead_s, 0.0, model.token_bytes / hardware.hbm_bytes_s),
        token_bytes=model.token_bytes,
        kv_tokens=int(0.9 * room / model.token_bytes),
        chunk_tokens=chunk_tokens,
        nic_bytes_s=hardware.nic_bytes_s,
    )


LLAMA3_70B = Geometry(70.6e9, 80, 8192, 8, 128)
LLAMA3_8B = Geometry(8.03e9, 32, 4096, 8, 128)
H200 = Hardware(989e12 * 0.6, 4.8e12 * 0.8, 141e9, 50e9, 1e-3)

PAPER_NODE = StepModel(
    # A dummy LLaMA3-70B on 8 A800, fitted to the figures of FAST'25: prefill to the 0 % row of Fig. 14 (8k .96 s, 16k
    # 2.07, 128k 27.5), decode to its 128 tokens (27.7 ms a step at 8k, 38 ms at 128k); the NICs' 87 GB/s are Fig. 12's.
    name="llama3-70b-8xa800",
    prefill=(8e-3, 1.144e-4, 7.28e-10),
    decode=(1.24e-2, 1.03e-4, 1.38e-2, 0.0, 8.8e-8),
    token_bytes=LLAMA3_70B.token_bytes,
    kv_tokens=1_300_000,
    chunk_tokens=8192,
    nic_bytes_s=87e9,
)

EMBEDDED_CPU = StepModel(
    # SmolLM2-135M in bfloat16 on one core with AMX, as scripts/tools.py validate fitted it to recorded steps of a node
    # with one thread (lab/results/2026-11-21-embedded-cpu-model.json, which also has the mixed steps).
    name="embedded-cpu",
    prefill=(2.29e-2, 2.21e-4, 5.9e-8),
    decode=(0.0, 0.0, 2.34e-2, 3.9e-4, 2.7e-6),
    token_bytes=23040,
    kv_tokens=93_200,
    chunk_tokens=1024,
    nic_bytes_s=4e9,
    max_batch=64,
    front_s=5.8e-3,
)

PRESETS: dict[str, StepModel] = {
    "llama3-70b-8xa800": PAPER_NODE,
    "llama3-8b-h200": roofline("llama3-8b-h200", LLAMA3_8B, H200),
    "embedded-cpu": EMBEDDED_CPU,
}
"""Step models by the value of --model."""


def with_bandwidth(model: StepModel, gbit_s: float) -> StepModel:
    """The same node with another NIC."""
    if not gbit_s > 0 or math.isinf(gbit_s):
        raise ValueError(f"--nic-gbit-s must be a positive number, got {gbit_s}")
    return replace(model, nic_bytes_s=gbit_s * 1e9 / 8)
