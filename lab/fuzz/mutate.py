"""Seeded mutations of valid inputs: bits, numbers at their limits, pieces cut, doubled or spliced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
MOST_CHANGES = 6


def mutated(rng: Random, corpus: Sequence[bytes]) -> bytes:
    """One input of the corpus with up to MOST_CHANGES changes; sometimes random bytes."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, MOST_CHANGES)):
        rng.choice(CHANGES)(rng, data, corpus)
    return bytes(data)


def _bit(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _edge(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A length or count at the end of its range."""
    width = rng.choice((1, 2, 4, 8))
    if len(data) >= width:
        at = rng.randrange(len(data) - width + 1)
        at -= at % rng.choice((1, width))  # the alignment of fields in packed structures
        value = rng.choice(EDGES) % (1 << 8 * width)
        data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _cut(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.randrange(1, 1 + max(1, len(data) // 2))]


def _end(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _double(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.randrange(1, 33)]
    data[at:at] = piece * rng.choice((1, 2, 16))


def _other(rng: Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """A piece of another input."""
    other = rng.choice(corpus)
    begin, at = rng.randrange(len(other) + 1), rng.randrange(len(data) + 1)
    data[at:at] = other[begin : begin + rng.randrange(1, 65)]


CHANGES: tuple[Callable[[Random, bytearray, Sequence[bytes]], None], ...] = (
    _bit, _bit, _byte, _edge, _edge, _cut, _end, _double, _other,
)  # fmt: skip
