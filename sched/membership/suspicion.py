"""Running suspicions: long at first, shorter with every node that confirms independently (Lifeguard).

With n of k expected confirmations, a suspect is declared dead after

    max - (max - min) * log(n + 1) / log(k + 1)        at least min

so a single wrong node must wait long enough to be refuted, and many nodes that agree need not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sched.membership.member import LAST_WORDS, Preset


@dataclass(slots=True)
class Suspicion:
    """The suspicion of one node in one incarnation."""

    started_at: float
    min_s: float
    max_s: float
    wanted: int  # number of confirmations that shorten it to min_s
    sources: set[str] = field(default_factory=set)
    asked: int = 0  # number of direct questions to the suspect
    heard_at: float = -math.inf  # an answer would have arrived by then

    def confirm(self, source: str) -> bool:
        """`source` suspects the node too. Returns True if that is new and worth passing on."""
        if source in self.sources or len(self.sources) > self.wanted:
            return False
        self.sources.add(source)
        return True

    @property
    def ends_at(self) -> float:
        confirmations = len(self.sources) - 1
        if confirmations >= self.wanted:
            return self.started_at + self.min_s
        share = math.log(confirmations + 1) / math.log(self.wanted + 1)
        return self.started_at + self.max_s - (self.max_s - self.min_s) * share

    def next_at(self, timeout_s: float) -> float:
        """Time of the next direct question before the end, or the end itself after all questions could be answered."""
        return max(self.heard_at, self.ends_at - (LAST_WORDS - self.asked) * timeout_s)


class Suspicions:
    """All running suspicions by node id."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._open: dict[str, Suspicion] = {}

    def start(self, now: float, node_id: str, source: str, n: int) -> None:
        """`source` suspects the node, in a cluster of n members. A running suspicion restarts."""
        preset = self._preset
        wanted = preset.confirmations if n - 2 >= preset.confirmations else 0  # the suspect and the first source
        self._open[node_id] = Suspicion(now, preset.suspicion_s(n), preset.suspicion_max_s(n), wanted, {source})

    def confirm(self, node_id: str, source: str) -> bool:
        """Returns True if this is a new confirmation of a running suspicion."""
        suspicion = self._open.get(node_id)
        return suspicion is not None and suspicion.confirm(source)

    def last_word(self, now: float, node_id: str) -> bool:
        """Returns True if the suspect should be asked directly, up to LAST_WORDS times: its refutation may have been
        lost only on the path to this node. Returns False if its time is up."""
        suspicion = self._open[node_id]
        if suspicion.asked == LAST_WORDS:
            return False
        suspicion.asked += 1
        suspicion.heard_at = now + self._preset.probe_timeout_s
        return True

    def end(self, node_id: str) -> None:
        self._open.pop(node_id, None)

    def clear(self) -> None:
        self._open.clear()

    def shift(self, seconds: float) -> None:
        """Move all deadlines by `seconds`, the time during which this node was paused."""
        for suspicion in self._open.values():
            suspicion.started_at += seconds
            suspicion.heard_at += seconds

    def over(self, now: float) -> Iterator[str]:
        """Nodes whose time is up, or that must be asked directly."""
        timeout_s = self._preset.probe_timeout_s
        yield from [node_id for node_id, suspicion in self._open.items() if now >= suspicion.next_at(timeout_s)]

    def wake_at(self) -> float:
        if not self._open:
            return math.inf
        return min(suspicion.next_at(self._preset.probe_timeout_s) for suspicion in self._open.values())
