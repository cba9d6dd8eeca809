"""Serial numbers (RFC 1982): counters that wrap around, so that there is always a newer one. Pure.

Of two numbers on the circle the newer one is ahead by less than half of it. A counter that ends would be the end of its
node: without a cluster key one packet of a stranger can name the last number, which nobody could outbid.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

BITS = 32
_SIZE = 1 << BITS
_HALF = _SIZE >> 1

LARGEST_GAP = 1 << 16
"""Two numbers that a node's own processes have given are not further apart than this."""


class Chance(Protocol):
    """The part of random.Random that is needed here."""

    def getrandbits(self, bits: int, /) -> int: ...


def newer(number: int, than: int) -> bool:
    """Of two numbers exactly half of the circle apart neither is newer."""
    return 0 < (number - than) % _SIZE < _HALF


def following(number: int) -> int:
    """The next one; never 0, which means "none yet" where these numbers travel."""
    return (number + 1) % _SIZE or 1


def outbidding(rival: int, own: int, rng: Chance) -> int:
    """A number newer than `rival`, which somebody holds in place of `own`.

    A rival far away was planted. Strangers can plant several, so far apart that no number is newer than all of them,
    and the owner would go back and forth between them; a random step ahead ends that after a few rounds.
    """
    near = min((rival - own) % _SIZE, (own - rival) % _SIZE) < LARGEST_GAP
    return following((rival + (0 if near else rng.getrandbits(BITS - 2))) % _SIZE)


Numbers = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


def newer_of(numbers: Numbers, than: Numbers) -> npt.NDArray[np.bool_]:
    """`newer` element by element, over all bits of their type, which must be the same. 0 is none: all are newer."""
    half = numbers.dtype.type(1 << 8 * numbers.dtype.itemsize - 1)
    ahead = numbers - than
    found: npt.NDArray[np.bool_] = (numbers != 0) & ((than == 0) | ((ahead != 0) & (ahead < half)))
    return found
