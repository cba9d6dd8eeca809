"""Divides the cold blocks of a request beyond memory: moved into DRAM, streamed from SSD, or asked elsewhere. Pure.

Every step reads each cold block of its request (sched/beyond.py). A block may also lie on another node, a *holder*:
then no KV travels. In each layer the query goes out, the holder attends to its blocks, and a part of the output comes
back with its log-sum-exp (attention/parts.py). The message does not grow with the context, but each layer waits for a
round trip (Infinite-LLM, arXiv 2401.02669; Adrenaline, arXiv 2503.20552). Own reads and asks go on at the same time:

    own        s1 (near bytes) + s2 (far bytes)
    a holder   layers x (round trip with a query and a part) + (held bytes) / (rate of its attention)
    a token    s0 + the longest of them

`divide` makes them equally long as far as rooms allow, and takes a holder only where that shortens the whole answer:
its blocks must first travel there, and each chunk of the prompt asks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sched.beyond import Forecast, Room

ROUNDS = 50
"""Halvings of the interval in which the time of a token is sought."""

ROUNDING = 1e-9
"""Added to a time in which all blocks fit: where the way to a holder takes far longer than a block, the difference of
the two is rounded by more than a block's share."""

LEAST_DEADLINE_S, DEADLINE_FACTOR = 5.0, 4.0
"""A holder that has not answered after this many seconds, and this many times what its rate allows, counts as lost."""


LEAST_SOON_S, SOON_FACTOR = 0.02, 8.0
"""A step waits for a holder this many seconds, and this many times as long as its answers take; then it goes on without
the request that asked."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that lends room for blocks and attends to them."""

    node: str
    blocks: int  # it lends at most
    ask_s: float  # for one layer of one token, without keys: the way there and back
    bytes_per_s: float  # of keys and values, for one token
    link_bytes_per_s: float  # of blocks and of the queries of a chunk, to it

    def token_s(self, blocks: int, job: Job) -> float:
        """Seconds that it takes per token over this many blocks."""
        return job.layers * self.ask_s + blocks * job.block_bytes / self.bytes_per_s if blocks else 0.0

    def within(self, token_s: float, job: Job) -> int:
        """Blocks that it can attend to in this time."""
        left = token_s - job.layers * self.ask_s
        return max(0, min(self.blocks, int(left * self.bytes_per_s / job.block_bytes + 1e-9)))


@dataclass(frozen=True, slots=True)
class Own:
    """What this node reads itself."""

    near_blocks: int  # room in DRAM
    far_blocks: int  # and on SSD
    near_s: float  # per block and token
    far_s: float

    def token_s(self, blocks: int) -> float:
        near = min(blocks, self.near_blocks)
        return near * self.near_s + (blocks - near) * self.far_s

    def within(self, token_s: float) -> int:
        """Blocks that it can read in this time."""
        near = _count(token_s, self.near_s, self.near_blocks)
        if near < self.near_blocks:
            return near
        return near + _count(token_s - near * self.near_s, self.far_s, self.far_blocks)


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    need: int  # cold blocks at its end
    prompt: int  # tokens that are not known
    output: int  # tokens at most
    chunk_tokens: int  # of one step of its prompt
    layers: int
    block_bytes: int
    row_bytes: int  # of a query and a part: one token in one layer
    known: int = 0  # leading blocks that are here already; they stay


@dataclass(frozen=True, slots=True)
class Split:
    """Where the cold blocks of a request lie, in the order of the request: DRAM, holders, SSD."""

    near: int
    held: tuple[tuple[str, int], ...]  # (node, blocks), without empty ones
    far: int
    ask_s: float = 0.0  # of the slowest holder, per token
    prompt_s: float = 0.0  # that blocks, and asks of chunks, are on the way

    @property
    def num_held(self) -> int:
        return sum(blocks for _, blocks in self.held)


def divide(job: Job, own: Own, holders: Sequence[Holder], *, always: bool = False) -> Split | None:
    """The split with the shortest answer; with `always`, the holders take as many blocks as they lend. None: there is
    no room for all blocks."""
    quickest = sorted((one for one in holders if one.blocks > 0), key=lambda one: (one.token_s(1, job), one.node))
    if always:
        lent = sum(one.blocks for one in quickest)
        held = min(job.need, lent)
        rest = job.need - held
        if rest > own.near_blocks + own.far_blocks:
            return None
        return _split(job, own, rest, _shares(job, held, quickest))
    best: tuple[float, Split] | None = None
    for count in range(len(quickest) + 1):
        found = _balanced(job, own, quickest[:count])
        if found is not None:
            token_s = max(own.token_s(found.near + found.far), found.ask_s)
            seconds = found.prompt_s + job.output * token_s
            if best is None or seconds < best[0]:
                best = seconds, found
    return None if best is None else best[1]


def room_with(room: Room, split: Split) -> Room:
    """The room of a request whose blocks are divided in this way."""
    return replace(room, near_blocks=split.near, far_blocks=split.far, held_blocks=split.num_held)


def with_asks(found: Forecast, split: Split, read_s: float) -> Forecast:
    """found: of this node's reads alone, of which each token takes `read_s`."""
    token_s = found.token_s - read_s + max(read_s, split.ask_s)
    return replace(found, token_s=token_s, prompt_s=found.prompt_s + split.prompt_s)


def deadline_s(rows: int, nbytes: int, bytes_per_s: float) -> float:
    """Of one ask: `rows` queries over `nbytes` of keys and values."""
    return LEAST_DEADLINE_S + DEADLINE_FACTOR * rows * nbytes / bytes_per_s


def soon_s(rows: int, nbytes: int, ask_s: float, bytes_per_s: float) -> float:
    """How long a step waits for the answer to such an ask."""
    return LEAST_SOON_S + SOON_FACTOR * (ask_s + rows * nbytes / bytes_per_s)


def _balanced(job: Job, own: Own, holders: Sequence[Holder]) -> Split | None:
    """All of these may take blocks; the slowest is as quick as possible."""
    slowest = _token_s(job, own, holders)
    if slowest is None:
        return None
    mine = min(job.need, max(own.within(slowest), min(job.known, own.near_blocks)))
    return _split(job, own, mine, _within(job, job.need - mine, holders, slowest))


def _token_s(job: Job, own: Own | None, holders: Sequence[Holder]) -> float | None:
    """The least time of a token in which all blocks are read or asked; None: there is no room for them."""

    def blocks(token_s: float) -> int:
        return (0 if own is None else own.within(token_s)) + sum(one.within(token_s, job) for one in holders)

    least, most = 0.0, sum(one.token_s(one.blocks, job) for one in holders)
    if own is not None:
        most += own.token_s(own.near_blocks + own.far_blocks)
    most *= 1 + ROUNDING
    if blocks(most) < job.need:
        return None
    for _ in range(ROUNDS):
        middle = (least + most) / 2
        least, most = (least, middle) if blocks(middle) >= job.need else (middle, most)
    return most


def _shares(job: Job, held: int, holders: Sequence[Holder]) -> dict[Holder, int]:
    """`held` blocks, of which the holders have room for all."""
    slowest = _token_s(replace(job, need=held), None, holders)
    assert slowest is not None, "they lend as many"
    return _within(job, held, holders, slowest)


def _within(job: Job, held: int, holders: Sequence[Holder], token_s: float) -> dict[Holder, int]:
    shares = dict[Holder, int]()
    for one in holders:
        blocks = min(held, one.within(token_s, job))
        if blocks:
            shares[one] = blocks
            held -= blocks
    assert not held, "the time was chosen so"
    return shares


def _split(job: Job, own: Own, mine: int, shares: dict[Holder, int]) -> Split:
    chunks = -(-job.prompt // job.chunk_tokens)
    near = min(mine, own.near_blocks)
    return Split(
        near,
        tuple((one.node, blocks) for one, blocks in shares.items()),
        mine - near,
        max((one.token_s(blocks, job) for one, blocks in shares.items()), default=0.0),
        sum(
            (blocks * job.block_bytes + job.prompt * job.layers * job.row_bytes) / one.link_bytes_per_s
            + chunks * job.layers * one.ask_s
            for one, blocks in shares.items()
        ),
    )


def _count(seconds: float, each_s: float, most: int) -> int:
    if seconds <= 0:
        return 0
    return most if each_s * most <= seconds else int(seconds / each_s + 1e-9)
