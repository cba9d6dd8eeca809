"""Which spans of a submission have arrived, also if it failed half-way. Pure.

Transports cut spans into slices, join neighbours, and send slices in any order. They report which pieces have landed;
`of` computes which spans of the submission have landed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from net.transfer.common.spans import Span


class LandedSpans:
    """Pass an empty one to `TransferEngine.submit` and read it when the submission has ended."""

    def __init__(self) -> None:
        self._pieces: list[Span] = []

    def add(self, pieces: Iterable[Span]) -> None:
        """Add pieces (local offset, remote offset, length) whose bytes have all arrived."""
        self._pieces.extend(pieces)

    def of(self, spans: Sequence[Span]) -> list[bool]:
        """For each of the submission's spans, whether it has landed completely. Parts of the others may have landed."""
        pieces = defaultdict(list)  # distance between the two sides -> local (begin, end)
        for local, remote, length in self._pieces:
            pieces[remote - local].append((local, local + length))
        whole = {distance: _joined(found) for distance, found in pieces.items()}
        return [_covered(whole.get(remote - local, []), local, local + length) for local, remote, length in spans]


def _joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as disjoint, ordered (begin, end), with neighbours joined."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(pieces):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


def _covered(whole: list[tuple[int, int]], begin: int, end: int) -> bool:
    at = bisect_right(whole, (begin, float("inf"))) - 1
    return begin == end or (at >= 0 and whole[at][1] >= end)
