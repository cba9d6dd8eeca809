"""The part of a long prompt that one node of a pipeline computes: some of the layers, for tokens as they come in. Pure.

    first stage     its input is the prompt itself; it computes one planned chunk at a time
    later stages    their input is the hidden states that the stage before sends

`available` counts the tokens whose input is here, from the begin of the prompt. It is 0 until all stages agree on the
length of the known prefix (engine/pipeline/stages.py), so a request with a part is not scheduled before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

MAX_UNREAD = 3
"""Chunks that a stage may be ahead of the next one: one that is computed there, one that waits, and one whose answer is
on its way."""


@dataclass(slots=True)
class Part:
    """Changed only on the event loop, and not while a step computes it."""

    begin: int  # the layers [begin, end) of `num_layers`
    end: int
    num_layers: int
    most: int  # tokens in one step: their hidden states must fit into a message
    available: int = 0
    begun: bool = False  # the stages agree on the known prefix
    lost: bool = False  # its blocks went to other requests; nothing can be computed any more
    unread: int = 0  # chunks that the next stage has not taken yet
    ends: Sequence[int] = field(default_factory=list)  # where the planned chunks end; empty on later stages

    @property
    def first(self) -> bool:
        return self.begin == 0

    @property
    def last(self) -> bool:
        """Whether this stage samples the first token."""
        return self.end == self.num_layers

    @property
    def share(self) -> float:
        """Of the layers: the work of a token here, relative to the whole model."""
        return (self.end - self.begin) / self.num_layers

    def room(self, num_computed: int) -> int:
        """Number of tokens after `num_computed` that a step may compute now."""
        if self.lost or not self.begun or self.unread >= MAX_UNREAD:
            return 0
        end = next((end for end in self.ends if end > num_computed), self.available)
        return max(0, min(end, self.available, num_computed + self.most) - num_computed)

    def start(self, start: int, sizes: Sequence[int] = ()) -> None:
        """All stages have the KV of the first `start` tokens. `sizes`: of the chunks, on the first stage, where the
        input is here already."""
        self.begun = True
        self.ends = list(accumulate(sizes, initial=start))[1:]
        self.available = self.ends[-1] if self.ends else start
