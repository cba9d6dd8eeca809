"""Serial numbers (RFC 1982): counters that wrap around, so that there is always a newer one. Pure.

Of two numbers on the circle, the newer one is ahead by less than half of the circle. A counter with a last number would
be fatal: without a cluster key, one packet of a stranger could contain that number, and the node could not outbid it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

BITS = 32
_SIZE = 1 << BITS
_HALF = _SIZE >> 1

LARGEST_GAP = 1 << 16
"""Maximum distance of two numbers issued by processes of the same node."""


class Chance(Protocol):
    """The part of random.Random that is used here."""

    def getrandbits(self, bits: int, /) -> int: ...


def newer(number: int, than: int) -> bool:
    """Whether `number` is newer. Of two numbers exactly half a circle apart, neither is newer."""
    return 0 < (number - than) % _SIZE < _HALF


def following(number: int) -> int:
    """The next number. It skips 0, which means "none yet" on the wire."""
    return (number + 1) % _SIZE or 1


def outbidding(rival: int, own: int, rng: Chance) -> int:
    """A number newer than `rival`, which another node holds instead of `own`.

    A distant rival is forged. Strangers can forge several that are so far apart that no number is newer than all of
    them, and the owner would alternate between them; a random step ahead ends this after a few rounds.
    """
    near = min((rival - own) % _SIZE, (own - rival) % _SIZE) < LARGEST_GAP
    return following((rival + (0 if near else rng.getrandbits(BITS - 2))) % _SIZE)


Numbers = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


def newer_of(numbers: Numbers, than: Numbers) -> npt.NDArray[np.bool_]:
    """`newer` for each element. Both arrays must have the same type. 0 means "none": every other number is newer."""
    half = numbers.dtype.type(1 << 8 * numbers.dtype.itemsize - 1)
    ahead = numbers - than
    found: npt.NDArray[np.bool_] = (numbers != 0) & ((than == 0) | ((ahead != 0) & (ahead < half)))
    return found
