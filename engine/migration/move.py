"""The move of one running request to another decode node, as the source sees it. Pure.

    begin ─> reserve ─> copy whole blocks while it decodes ─┐
                ^───────── blocks were added meanwhile ──────┤ at most MAX_STAGES times
                                                             └─> stop ─> copy the rest ┐
                                                                       tell the acceptor ┴─> commit ─> free

The destination reserves blocks before each copy. Only between `Stop` and `Committed` nobody computes the request. The
acceptor is told before the commit and behind the last token of the source, so it has every earlier token and knows the
destination when the destination begins. When something fails before the commit, the request goes on here. A commit
without an answer may have happened or not: then the attempt fails, and the acceptor places the request again with the
tokens that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MAX_STAGES = 3
"""Copies while the request decodes."""

LAST_BLOCKS = 1
"""The request stops when at most this many whole blocks are not copied yet."""

AHEAD_BLOCKS = 2
"""Blocks reserved beyond the known tokens: the request decodes on while they are copied."""


class Phase(Enum):
    """What the source waits for."""

    RESERVING = "reserving"
    COPYING = "copying"
    STOPPING = "stopping"
    GROWING = "growing"  # stopped, and the destination has too few blocks for the last tokens
    LAST = "last"  # the last copy, and the acceptor
    COMMITTING = "committing"
    OVER = "over"


# --- events


@dataclass(frozen=True, slots=True)
class Reserved:
    """The destination holds `blocks` blocks; `computed`: tokens with KV here, now."""

    blocks: int
    computed: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy has landed; `computed` as in Reserved."""

    computed: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """No step computes the request any more, and its tokens are on their way to the acceptor."""

    computed: int


@dataclass(frozen=True, slots=True)
class Told:
    """The acceptor has all tokens and knows the destination."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The destination computes the request."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The move cannot go on: refused, a node lost, a deadline passed. The destination does not compute the request."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The commit has no answer: the destination may compute the request."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """The request has ended here, or lost its blocks."""

    reason: str


Event = Reserved | Copied | Stopped | Told | Committed | Broken | Unanswered | Gone


# --- effects


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask the destination to hold `blocks` blocks for the request, those it has included."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the blocks from `first` on that have the tokens up to `tokens`."""

    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Take the request out of the batch, behind the running step."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the acceptor the destination, behind the last token."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Ask the destination to go on with the request."""


@dataclass(frozen=True, slots=True)
class Free:
    """The move is done: free the request here; the acceptor learns it. `pause_s`: from Stop to Committed."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class Resume:
    """The request goes on here; `told`: the acceptor knows of the move."""

    told: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """The destination frees what it has reserved."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the attempt: the acceptor places the request again."""

    reason: str


Effect = Reserve | Copy | Stop | Tell | Commit | Free | Resume | Drop | Fail


class Move:
    """`handle` after `begin`. Events that no longer matter are ignored, so they may come late and twice."""

    def __init__(self, block_size: int) -> None:
        self.phase = Phase.OVER
        self.stages = 0
        self._size = block_size
        self._reserved = self._copied = 0  # blocks
        self._stopped_at = 0.0
        self._stopping = self._told = False
        self._awaited: set[str] = set()  # in LAST: "copy" and "acceptor"
        self._last_tokens = 0

    def begin(self, computed: int) -> Sequence[Effect]:
        """`computed`: tokens with KV."""
        self.phase = Phase.RESERVING
        return [Reserve(self._blocks(computed) + AHEAD_BLOCKS)]

    def handle(self, now: float, event: Event) -> Sequence[Effect]:
        """`now`: a steady clock, seconds."""
        match self.phase, event:
            case Phase.RESERVING, Reserved(blocks, computed):
                self._reserved = blocks
                return self._stage(now, computed)
            case Phase.COPYING, Copied(computed):
                return self._stage(now, computed)
            case Phase.STOPPING, Stopped(computed):
                self._last_tokens = computed
                if self._blocks(computed) > self._reserved:
                    self.phase = Phase.GROWING
                    return [Reserve(self._blocks(computed))]
                return self._last()
            case Phase.GROWING, Reserved(blocks, _):
                self._reserved = blocks
                return self._last()
            case Phase.LAST, Copied(_):
                return self._arrived("copy")
            case Phase.LAST, Told():
                return self._arrived("acceptor")
            case Phase.COMMITTING, Committed():
                self.phase = Phase.OVER
                return [Free(now - self._stopped_at)]
            case Phase.COMMITTING, Unanswered(reason):
                self.phase = Phase.OVER
                return [Fail(reason)]
            case Phase.COMMITTING, Gone():
                return []  # the acceptor that ended it knows the destination; the answer to the commit still comes
            case (Phase.OVER, _):
                return []
            case _, Broken(reason):
                self.phase = Phase.OVER
                resume = [Resume(self._told)] if self._stopping else []
                return [*resume, Drop(reason)]
            case _, Gone(reason):
                self.phase = Phase.OVER
                return [Drop(reason)]
        return []

    def _stage(self, now: float, computed: int) -> Sequence[Effect]:
        """The next copy while the request decodes, or its end here."""
        full = computed // self._size
        if self._blocks(computed) + 1 > self._reserved:
            self.phase = Phase.RESERVING
            return [Reserve(self._blocks(computed) + AHEAD_BLOCKS)]
        if self.stages < MAX_STAGES and full - self._copied > LAST_BLOCKS:
            self.phase, self.stages = Phase.COPYING, self.stages + 1
            first, self._copied = self._copied, full
            return [Copy(first, full * self._size)]
        self.phase, self._stopped_at, self._stopping = Phase.STOPPING, now, True
        return [Stop()]

    def _last(self) -> Sequence[Effect]:
        self.phase, self._awaited, self._told = Phase.LAST, {"copy", "acceptor"}, True
        return [Tell(), Copy(self._copied, self._last_tokens)]

    def _arrived(self, what: str) -> Sequence[Effect]:
        self._awaited.discard(what)
        if self._awaited:
            return []
        self.phase = Phase.COMMITTING
        return [Commit()]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)
