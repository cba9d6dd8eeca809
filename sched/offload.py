"""Plans a model whose weights exceed the memory that they may use: which layers stay, and what a pass costs. Pure.

A *pass* is one run of the model over all rows of a step. Layers that do not stay in memory are read from disk in every
pass, into a *ring* of buffers: a reader fills one buffer after the other while earlier layers compute. All rows of a
step share what was read, so a step is FlexGen's block of batches (arXiv 2303.06865, section 4), and

    seconds of a pass >= max( bytes read / bandwidth, layers x (c0 + c1 rows) )

where c0 + c1 rows are the seconds of a layer's products. `choose` tries rings of several depths: a deeper one takes
memory in which a layer could stay, and a shallow one makes the reader wait for computation. The layers that are read
lie evenly among the others, so that the reader is never far behind nor far ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from sched.batching import BatchingPolicy, StepLoad

LEAST_RING = 2
"""Buffers: one is computed with while the other is filled."""

MOST_RING = 6
"""With more, no layer waits less: every pass reads the same bytes."""

WARM_PASSES, COUNTED_PASSES = 4, 4
"""Of a forecast: first passes begin with an empty ring, later ones with what was read meanwhile."""

MOST_ROWS = 1 << 20
"""`fill_rows` of a node on which further rows cost nothing."""

MB = 1e6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of weights in the form in which they are computed."""

    fixed: int  # always in memory: embedding, head, norms, the first product
    layers: tuple[int, ...]  # of each layer, as in the file and in a buffer

    @property
    def total(self) -> int:
        return self.fixed + sum(self.layers)

    @property
    def least(self) -> int:
        """Memory with which the model can be computed at all."""
        return self.fixed + LEAST_RING * max(self.layers)


@dataclass(frozen=True, slots=True)
class Speed:
    """What a node has measured when it starts."""

    read_bytes_s: float  # from the disk, without computation
    layer_s: float  # of the products of a layer, whatever the number of rows
    row_s: float  # and of each row

    def layer_seconds(self, rows: int) -> float:
        return self.layer_s + self.row_s * rows


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays and what is read. Without streamed layers, everything stays."""

    sizes: Sizes
    speed: Speed
    streamed: tuple[int, ...]  # layers that are read in each pass, ascending
    ring: int  # buffers

    @property
    def buffer_bytes(self) -> int:
        return max((self.sizes.layers[layer] for layer in self.streamed), default=0)

    @property
    def pass_bytes(self) -> int:
        """Read in each pass."""
        return sum(self.sizes.layers[layer] for layer in self.streamed)

    @property
    def memory_bytes(self) -> int:
        """Of weights in memory and buffers."""
        return self.sizes.total - self.pass_bytes + self.ring * self.buffer_bytes

    @property
    def read_s(self) -> float:
        """No pass is faster."""
        return self.pass_bytes / self.speed.read_bytes_s

    @property
    def fill_rows(self) -> int:
        """Rows of a step that are computed in the time in which a pass reads: fewer would not make it faster."""
        if not self.streamed:
            return 0
        spare = self.read_s / len(self.sizes.layers) - self.speed.layer_s
        return 0 if spare <= 0 else ceil(min(spare / self.speed.row_s, MOST_ROWS)) if self.speed.row_s else MOST_ROWS

    def pass_s(self, rows: int) -> float:
        """Forecast of one of many passes in a row, without attention."""
        layer_s = self.speed.layer_seconds(rows)
        reads = {layer: self.sizes.layers[layer] / self.speed.read_bytes_s for layer in self.streamed}
        least = max(self.read_s, layer_s * len(self.sizes.layers))
        ends = pass_ends(len(self.sizes.layers), layer_s, reads, self.ring, WARM_PASSES + COUNTED_PASSES)
        return max(least, (ends[-1] - ends[WARM_PASSES - 1]) / COUNTED_PASSES)

    def tokens_per_s(self, rows: int) -> float:
        """Of `rows` requests that decode together."""
        return rows / self.pass_s(rows)


def pass_ends(layers: int, layer_s: float, reads: dict[int, float], ring: int, passes: int) -> list[float]:
    """When each of some passes ends. `reads`: layer -> seconds to read it. The reader begins the next layer that is
    read as soon as it has read the one before and a buffer is free; a layer begins when the one before has ended and
    its weights are there."""
    order = sorted(reads)
    now = read = 0.0
    freed: list[float] = []  # when the layer that was read n-th gave its buffer back
    ends = []
    for _ in range(passes):
        place = 0
        for layer in range(layers):
            if place < len(order) and order[place] == layer:
                room = freed[-ring] if len(freed) >= ring else 0.0
                read = max(read, room) + reads[layer]
                now = max(now, read) + layer_s
                freed.append(now)
                place += 1
            else:
                now += layer_s
        ends.append(now)
    return ends


def spread(layers: int, count: int) -> tuple[int, ...]:
    """`count` of `layers` places, evenly: 5 of 10 are 1, 3, 5, 7, 9."""
    return tuple((2 * place + 1) * layers // (2 * count) for place in range(count))


def choose(sizes: Sizes, memory_bytes: int, speed: Speed, rows: int) -> Plan | None:
    """The plan whose passes over `rows` rows are the fastest, then those over one row, then the one with the least
    memory. None if not even a ring of LEAST_RING layers fits into `memory_bytes`."""
    if sizes.total <= memory_bytes:
        return Plan(sizes, speed, (), 0)
    found = [plan for ring in range(LEAST_RING, MOST_RING + 1) if (plan := _plan(sizes, memory_bytes, speed, ring))]
    return min(found, key=lambda plan: (plan.pass_s(rows), plan.pass_s(1), plan.memory_bytes), default=None)


def _plan(sizes: Sizes, memory_bytes: int, speed: Speed, ring: int) -> Plan | None:
    """As many layers as possible stay."""
    layers = len(sizes.layers)
    for count in range(1, layers + 1):
        plan = Plan(sizes, speed, spread(layers, count), ring)
        if plan.memory_bytes <= memory_bytes:
            return plan
    return None


def no_room(sizes: Sizes, memory_bytes: int) -> str | None:
    """Why the weights cannot even be streamed; None if they can."""
    if sizes.least <= memory_bytes:
        return None
    return (
        f"--weight-memory-bytes {memory_bytes}: embedding, head and norms take {sizes.fixed} bytes, and {LEAST_RING} "
        f"layers of {max(sizes.layers)} bytes must fit to read one while the other computes; give {sizes.least} or "
        "more, or a narrower --weight-dtype"
    )


def described(plan: Plan, memory_bytes: int, rows: int) -> str:
    """The plan, why, and what it will cost, for the log."""
    sizes, speed = plan.sizes, plan.speed
    kept = len(sizes.layers) - len(plan.streamed)
    return (
        f"--offload auto: the weights take {_mb(sizes.total)}, and {_mb(memory_bytes)} are allowed "
        f"(--weight-memory-bytes). {kept} of {len(sizes.layers)} layers stay; {len(plan.streamed)} are read in each "
        f"pass, {_mb(plan.pass_bytes)} at {speed.read_bytes_s / 1e9:.2f} GB/s, into {plan.ring} buffers. Forecast "
        f"without attention: {plan.pass_s(1):.3g} s for 1 row ({plan.tokens_per_s(1):.3g} tokens/s), "
        f"{plan.pass_s(rows):.3g} s for {rows} ({plan.tokens_per_s(rows):.3g} tokens/s); reading takes "
        f"{plan.read_s:.3g} s, as long as {plan.fill_rows} rows"
    )


class FilledSteps:
    """Gives steps at least the rows that are computed while a pass reads, whatever the other policy says: fewer would
    not shorten the step."""

    def __init__(self, policy: BatchingPolicy, rows: int) -> None:
        self.decodes_wait = policy.decodes_wait
        self._policy, self._rows = policy, rows

    def prefill_tokens(self, load: StepLoad) -> int:
        """See BatchingPolicy."""
        return max(self._policy.prefill_tokens(load), self._rows - load.decodes)


def _mb(nbytes: int) -> str:
    return f"{nbytes / MB:.3g} MB" if nbytes < 1000 * MB else f"{nbytes / MB / 1000:.3g} GB"
