"""The part of a long prompt that one node of a group computes: some of its layers, or some of its tokens. Pure.

    Stage      some of the layers of all tokens, as they come in (a pipeline)
    Stripes    all layers of some of the tokens (context parallelism)

A part is not scheduled before all nodes agree on the length of the known prefix (engine/prefill_group/). A chunk keeps
its tokens and passes the layers in one step, or in several if other prompts come meanwhile (apart.py).
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from engine.step.apart import Apart
from sched.stripes import owner

MAX_UNREAD = 3
"""Largest chunks that a stage may be ahead of the next one: one that is computed there, one that waits, and one whose
answer is on its way."""


@dataclass(slots=True)
class Part(Apart):
    """Changed only on the event loop, and not while a step computes it, but for `hidden` and `spent_s`."""

    begin: int  # the layers [begin, end) of `num_layers`
    end: int
    num_layers: int
    most: int  # tokens in one step: what it passes on must fit into a message
    begun: bool = False  # the nodes agree on the known prefix
    lost: str = ""  # why nothing of it can be computed any more: its blocks, or those it needs, are other requests'

    @property
    def span(self) -> range:
        return range(self.begin, self.end)

    @property
    def model_layers(self) -> int:
        return self.num_layers

    def next_layers(self, count: int, work: float) -> range:
        """The layers that `count` tokens pass next: about as many as take the time in which `work` tokens pass the
        whole model; at least one."""
        return self.layers_left[: max(1, round(min(work, count) * self.num_layers / count))]

    @property
    def share(self) -> float:
        """Of the layers: the work of a token here, relative to the whole model."""
        return (self.end - self.begin) / self.num_layers

    @property
    def load(self) -> float:
        """The work of this part, relative to the prompt on one node."""
        return self.share

    @property
    @abstractmethod
    def last(self) -> bool:
        """Whether this node samples the first token."""

    @property
    @abstractmethod
    def follows(self) -> bool:
        """Whether other nodes of the group compute something before this one can begin."""

    @abstractmethod
    def room(self, num_computed: int) -> int:
        """Number of tokens after `num_computed` that a step may compute now."""

    @abstractmethod
    def start(self, start: int, sizes: Sequence[int] = ()) -> None:
        """All nodes have the KV of the first `start` tokens. `sizes`: of the chunks."""

    def stop(self, num_tokens: int) -> int:
        """The token of a prompt of `num_tokens` tokens behind which nothing is computed here."""
        return num_tokens

    def owed_from(self, token: int, num_tokens: int) -> int:
        """The first token that this part still owes when all it computes before `token` is delivered."""
        return token


@dataclass(slots=True)
class Stage(Part):
    """The part of one node of a pipeline.

        first stage     its input is the prompt itself; it computes one planned chunk at a time
        later stages    their input is the hidden states that the stage before sends

    `available` counts the tokens whose input is here, from the begin of the prompt, 0 until all stages agree."""

    available: int = 0
    unread: float = 0.0  # largest chunks that the next stage has not taken yet; a shorter one is a part of one
    largest: int = 0  # tokens of the largest chunk that is planned or has arrived
    ends: Sequence[int] = field(default_factory=list)  # where the planned chunks end; empty on later stages

    @property
    def first(self) -> bool:
        return self.begin == 0

    @property
    def last(self) -> bool:
        return self.end == self.num_layers

    @property
    def follows(self) -> bool:
        return not self.first

    def room(self, num_computed: int) -> int:
        if self.lost or not self.begun or self.unread >= MAX_UNREAD:
            return 0
        end = next((end for end in self.ends if end > num_computed), self.available)
        return max(0, min(end, self.available, num_computed + self.most) - num_computed)

    def start(self, start: int, sizes: Sequence[int] = ()) -> None:
        """`sizes`: on the first stage, where the input is here already."""
        self.begun = True
        self.ends = list(accumulate(sizes, initial=start))[1:]
        self.largest = max(sizes, default=0)
        self.available = self.ends[-1] if self.ends else start

    def arrived(self, count: int) -> None:
        """The input of `count` more tokens."""
        self.available += count
        self.largest = max(self.largest, count)

    def ahead(self, count: int) -> float:
        """What `count` computed tokens add to `unread` until the next stage has taken them."""
        return count / max(self.largest, count)


@dataclass(slots=True)
class Stripes(Part):
    """The part of node `index` of `nodes` that divide the tokens of a prompt: the chunks of which it is the owner.

    The step of a chunk needs the KV of all tokens before it. While it runs, it waits for what is still on its way, so a
    chunk may begin when all chunks before it have begun: `num_computed` then moves to the chunk's first token."""

    index: int = 0
    nodes: int = 1
    borders: Sequence[int] = ()  # chunk k of the prompt: the tokens [borders[k], borders[k + 1])

    @property
    def load(self) -> float:
        return 1 / self.nodes

    @property
    def last(self) -> bool:
        return self.index == self.nodes - 1

    @property
    def follows(self) -> bool:
        return not self.borders or self.next_begin(0) != self.borders[0]

    def start(self, start: int, sizes: Sequence[int] = ()) -> None:
        self.begun = True
        self.borders = list(accumulate(sizes, initial=start))

    def chunks_of(self, node: int) -> list[tuple[int, int]]:
        """The tokens [begin, end) of each chunk of that node."""
        count = len(self.borders) - 1
        return [each for k, each in enumerate(pairwise(self.borders)) if owner(k, count, self.nodes) == node]

    def room(self, num_computed: int) -> int:
        end = self._end_of(num_computed)
        return 0 if self.lost or end is None else min(end - num_computed, self.most)

    def _end_of(self, token: int) -> int | None:
        """The end of the chunk with this token; None if it is not computed here."""
        chunk, count = bisect_right(self.borders, token) - 1, len(self.borders) - 1
        own = 0 <= chunk < count and owner(chunk, count, self.nodes) == self.index
        return self.borders[chunk + 1] if own else None

    def next_begin(self, token: int) -> int | None:
        """Where this node's next chunk begins that does not begin before `token`; None behind the last one."""
        return next((begin for begin, _ in self.chunks_of(self.index) if begin >= token), None)

    def stop(self, num_tokens: int) -> int:
        return self.chunks_of(self.index)[-1][1]

    def owed_from(self, token: int, num_tokens: int) -> int:
        if self._end_of(token) is not None:
            return token
        begin = self.next_begin(token)
        return num_tokens if begin is None else begin
