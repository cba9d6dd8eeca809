"""Decides which ranks are given up: those that show no sign of life, or no answer, for too long. Pure.

A rank beats every 10 ms while its process runs, whatever it computes. Two limits follow from what was seen of it:

    no beat      BEATS x the longest pause between two of its beats lately, at least LEAST_S, at most MOST_S
    no answer    ANSWERS x the longest round of as much work lately, at least LEAST_ANSWER_S: it beats, and yet its work
                 does not end. Before any round has ended, ANSWER_S

Both adapt: on busy cores pauses and rounds grow, and the limits with them. Rounds are of as much work if their sizes
agree up to a factor of two. Of a size that was not seen, those of the next smaller one count in proportion, or else
those of the next larger one. A round in which a rank was given up tells nothing about the others, and rounds of unknown
size tell only about each other: their limit is at least ANSWER_S.

Time counts only as far as the observer itself was running: between two looks at most LOOK_S. An observer that was
stopped, or waited for a core, does not take its own pause for the silence of others. Time in which a rank works for
other observers first counts neither for its answer nor for the length of the round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

LOOK_S = 0.05
"""The most that counts between two looks; the observer looks more often than this."""

LEAST_S, MOST_S, BEATS = 0.5, 1.5, 8.0
ANSWER_S, LEAST_ANSWER_S, ANSWERS = 10.0, 1.5, 20.0
HALF_LIFE_S = 30.0
"""After this much counted time, the longest pause and the longest round count half."""


@dataclass(slots=True)
class _Rank:
    beats: int
    silent_s: float = 0.0  # since the last beat, in counted time
    waits_s: float = 0.0  # for its answer


class Silence:
    """Observes the ranks that a round waits for."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._pauses: dict[int, float] = {}  # the longest between two beats lately
        self._looked: float | None = None
        self._rounds: dict[int, float] = {}  # the longest lately, by the bits of its size; 0: of unknown size
        self._round = 0.0  # the one under way
        self._size = 0  # its bits
        self.answer_limit_s = ANSWER_S
        """Seconds without an answer after which a rank that beats is given up, in the round under way."""

    def begin(self, now: float, beats: Mapping[int, int], work: int = 0) -> None:
        """A round waits for these ranks, with their beats so far. `work`: in any unit, of the rank that has most of it;
        0 = not known."""
        self._ranks = {rank: _Rank(count) for rank, count in beats.items()}
        self._looked, self._round, self._size = now, 0.0, work.bit_length()
        longest = self._expected_s()
        least = LEAST_ANSWER_S if longest is not None and work else ANSWER_S
        self.answer_limit_s = max(least, ANSWERS * (longest or 0.0))

    def look(self, now: float, beats: Mapping[int, int], queued: Collection[int] = ()) -> list[int]:
        """`beats`: of the ranks that have not answered yet. `queued`: those of them that work for other observers
        first. Returns those to give up."""
        passed = min(max(0.0, now - (now if self._looked is None else self._looked)), LOOK_S)
        self._looked = now
        self._round += 0.0 if queued else passed
        fade = 0.5 ** (passed / HALF_LIFE_S)
        late = []
        for rank, count in beats.items():
            one = self._ranks[rank]
            one.waits_s += 0.0 if rank in queued else passed
            one.silent_s += passed
            if count != one.beats:
                self._pauses[rank] = max(self._pauses.get(rank, 0.0) * fade, one.silent_s)
                one.beats, one.silent_s = count, 0.0
            if one.silent_s > self.limit_s(rank) or one.waits_s > self.answer_limit_s:
                late.append(rank)
        return late

    def end(self, whole: bool) -> None:
        """The round has ended for all ranks that are left. `whole`: no rank was given up in it, for whatever reason."""
        fade = 0.5 ** (self._round / HALF_LIFE_S)
        self._rounds = {size: longest * fade for size, longest in self._rounds.items()}
        if whole:
            self._rounds[self._size] = max(self._rounds.get(self._size, 0.0), self._round)
        self._ranks = {}

    def forget(self, ranks: Iterable[int]) -> None:
        """Other processes have their places now, or they begin again."""
        for rank in ranks:
            self._pauses.pop(rank, None)

    def limit_s(self, rank: int) -> float:
        """Seconds without a beat, in counted time, after which the rank is given up."""
        return min(MOST_S, max(LEAST_S, BEATS * self._pauses.get(rank, 0.0)))

    def beats_without_answer(self, rank: int) -> bool:
        """Of a rank that is given up: whether it was for want of an answer."""
        return self._ranks[rank].silent_s <= self.limit_s(rank)

    def _expected_s(self) -> float | None:
        """The longest round of as much work as the one under way; None if none is like it."""
        if self._size in self._rounds:
            return self._rounds[self._size]
        smaller = [size for size in self._rounds if 0 < size < self._size]
        if smaller:
            return self._rounds[max(smaller)] * 2.0 ** (self._size - max(smaller))
        larger = [size for size in self._rounds if size > self._size > 0]
        return self._rounds[min(larger)] if larger else None
