"""StableMarks: words in shared memory that say whether the memory of a running put is unchanged.

A home on this host copies the blocks of a put from the memory of the process that puts (cache/server/taking.py). If
that process gives the put up, its caller may change the memory, even while the home still copies, for example after it
was stopped. So each put takes a word for its number, and clears it when it ends in any way. The home looks after its
copy: if the word still has the number, nothing was changed until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from struct import Struct

from net.transfer.common.memory import Region

MARKS_REGION = "put-marks"
MARKS = 512  # puts at the same time; more go another way
WORD = Struct("<Q")

Mark = tuple[int, int]
"""(index of the word, number of the put)"""


class StableMarks:
    """The marks of this process, for any of its threads. The caller registers `region`."""

    def __init__(self) -> None:
        self.region = Region.shared(MARKS_REGION, MARKS * WORD.size)
        self._free = list(range(MARKS))
        self._numbers = count(1)

    @contextmanager
    def mark(self) -> Iterator[Mark | None]:
        """A mark that holds while this is open; None if there are too many."""
        try:
            index, number = self._free.pop(), next(self._numbers)
        except IndexError:
            yield None
            return
        WORD.pack_into(self.region.memory, index * WORD.size, number)
        try:
            yield index, number
        finally:
            WORD.pack_into(self.region.memory, index * WORD.size, 0)
            self._free.append(index)

    def close(self) -> None:
        self.region.close()


def holds(region: Region, mark: Mark) -> bool:
    """Whether the put with that mark still runs. `region`: the StableMarks of its process."""
    index, number = mark
    if not 0 <= index < region.nbytes // WORD.size:
        return False
    found: int = WORD.unpack_from(region.memory, index * WORD.size)[0]
    return found == number
