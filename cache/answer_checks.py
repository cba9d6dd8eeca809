"""The checks of a home's answer against the keys of the question. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cache.protocol import PRESENT
from net.errors import RemoteError


def count_found(slots: Sequence[int], asked: int) -> int:
    """Number of entries of `slots` that are slots. Raises RemoteError when there are more than `asked` entries."""
    if len(slots) > asked:
        raise RemoteError(f"{len(slots)} answers about {asked} keys", "bad_answer")
    if not slots or min(slots) >= 0:  # the common case; this check takes a third of the time
        return len(slots)
    return sum(map(PRESENT.__lt__, slots))


def one_each(found: int, *columns: Sequence[object]) -> None:
    """Raises RemoteError unless each of `columns` has one entry for each of the blocks found."""
    for column in columns:
        if len(column) != found:
            raise RemoteError(f"properties of {len(column)} blocks instead of {found}", "bad_answer")


def all_about(positions: Sequence[int], asked: int) -> None:
    """Raises RemoteError for a position outside the keys."""
    if positions and not 0 <= min(positions) <= max(positions) < asked:
        raise RemoteError(f"positions {min(positions)} to {max(positions)} among {asked} keys", "bad_answer")
