"""The bytes of a coded frame, as numpy computes them: the C code is tested against this.

An element has an exponent of 8 bits (float16: 5), and its sign and mantissa, `rest` bits, with the sign on top.
The signs and mantissas of a tile are planes of one byte per element, the lowest byte first; the 3 bits of float16 above
the first byte are packed like codes.

The width and the base of a tile follow from every 8th exponent: the codes 0 ... 2^width - 2 stand for base + code, the
highest code for a listed exponent of 8 more bits. The pair with the fewest bits is chosen, the smallest width and then
the smallest base among equals, with widths from 1 to 6 and bases between the smallest and the largest exponent seen.
A tile with one exponent has width 0; a tile whose codes save nothing is raw.
"""

from __future__ import annotations

from struct import Struct

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from net.codec.exponents import CHECK, DAMAGE, FIELDS, HEAD_BYTES, KINDS, NAMES, CodecError, opened

TILE = 8192
WIDTHS = range(1, 7)
RAW = 255
SAMPLE_EVERY = 8
TILE_HEAD = Struct("<BBH")
WORDS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
EXPONENT = {"bfloat16": 8, "float16": 5, "float32": 8}

Bytes = NDArray[np.uint8]


def encoded(raw: bytes, dtype: str) -> bytes:
    """The frame of `raw`, whose elements are of `dtype`."""
    item = np.dtype(WORDS[dtype]).itemsize
    whole = len(raw) // item * item
    elements = np.frombuffer(raw[:whole], WORDS[dtype])
    tiles = [_tile(elements[first : first + TILE], dtype) for first in range(0, len(elements), TILE)]
    body = FIELDS.pack(len(raw), KINDS[dtype]) + b"".join(tiles) + raw[whole:]
    return CHECK.pack(xxh3_64_intdigest(body)) + body


def decoded(frame: bytes, nbytes: int) -> bytes:
    """The reverse; nbytes: of the raw bytes. Raises CodecError."""
    dtype = NAMES[opened(memoryview(frame), nbytes)]
    item, at, out = np.dtype(WORDS[dtype]).itemsize, HEAD_BYTES, []
    count = nbytes // item
    for first in range(0, count, TILE):
        elements, at = _elements(frame, at, min(TILE, count - first), dtype)
        out.append(elements.tobytes())
    rest = frame[at:]
    if len(rest) != nbytes - count * item:
        raise CodecError(f"a coded frame is damaged: {DAMAGE[1 if len(rest) < nbytes - count * item else 4]}")
    return b"".join(out) + rest


def packed(codes: Bytes, width: int) -> bytes:
    """The lowest `width` bits of each code, from the lowest bit of the first byte on; whole groups of eight codes."""
    padded = np.zeros(-(-len(codes) // 8) * 8, np.uint8)
    padded[: len(codes)] = codes
    bits = np.unpackbits(padded[:, None], axis=1, count=width, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def unpacked(data: bytes, width: int) -> Bytes:
    """The reverse: all codes, those of the padding too."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").reshape(-1, width)
    return np.packbits(bits, axis=1, bitorder="little")[:, 0]


def chosen(exponents: Bytes) -> tuple[int, int]:
    """(width, base) of a tile's exponents."""
    seen = np.bincount(exponents[::SAMPLE_EVERY], minlength=256)
    first, last = np.flatnonzero(seen)[[0, -1]].tolist()
    if (exponents == first).all():
        return 0, first
    sums = np.concatenate([[0], np.cumsum(seen)])
    best = min(
        (int(width * sums[-1] + 8 * (sums[-1] - (sums[min(256, base + 2**width - 1)] - sums[base]))), width, base)
        for width in WIDTHS
        for base in range(first, last + 1)
    )
    return best[1], best[2]


def _tile(elements: NDArray[np.unsignedinteger], dtype: str) -> bytes:
    exponents, rest = _split(elements, dtype)
    width, base = chosen(exponents)
    codes, escapes = b"", b""
    if width:
        differences = exponents - np.uint8(base)
        escape = 2**width - 1
        escapes = exponents[differences >= escape].tobytes()
        codes = packed(np.minimum(differences, escape).astype(np.uint8), width)
    if len(rest) + len(codes) + len(escapes) >= elements.nbytes:
        return TILE_HEAD.pack(RAW, 0, 0) + elements.tobytes()
    return TILE_HEAD.pack(width, base, len(escapes)) + rest + codes + escapes


def _split(elements: NDArray[np.unsignedinteger], dtype: str) -> tuple[Bytes, bytes]:
    """(exponents, the bytes of signs and mantissas)"""
    wide, mantissa, bits = elements.astype(np.uint32), MANTISSA[dtype], EXPONENT[dtype]
    exponents = (wide >> mantissa & (2**bits - 1)).astype(np.uint8)
    rest = (wide & (2**mantissa - 1)) | (wide >> (mantissa + bits) << mantissa)
    planes = [(rest >> 8 * i & 0xFF).astype(np.uint8).tobytes() for i in range((mantissa + 1) // 8)]
    if dtype == "float16":
        planes.append(packed((rest >> 8).astype(np.uint8), 3))
    return exponents, b"".join(planes)


def _elements(frame: bytes, at: int, count: int, dtype: str) -> tuple[NDArray[np.unsignedinteger], int]:
    """The `count` elements of the tile at `at`, and the place behind it. Raises CodecError."""

    def take(nbytes: int) -> bytes:
        nonlocal at
        at += nbytes
        if at > len(frame):
            raise CodecError(f"a coded frame is damaged: {DAMAGE[1]}")
        return frame[at - nbytes : at]

    groups = -(-count // 8)
    width, base, escapes = TILE_HEAD.unpack(take(TILE_HEAD.size))
    if width == RAW:
        return np.frombuffer(take(count * np.dtype(WORDS[dtype]).itemsize), WORDS[dtype]), at
    if width and width not in WIDTHS:
        raise CodecError(f"a coded frame is damaged: {DAMAGE[2]}")
    if escapes > count or (escapes and not width):
        raise CodecError(f"a coded frame is damaged: {DAMAGE[3]}")
    rest = np.zeros(count, np.uint32)
    for i in range((MANTISSA[dtype] + 1) // 8):
        rest |= np.frombuffer(take(count), np.uint8).astype(np.uint32) << 8 * i
    if dtype == "float16":
        rest |= unpacked(take(3 * groups), 3)[:count].astype(np.uint32) << 8
    exponents = np.full(groups * 8, base, np.uint8)
    if width:
        codes = unpacked(take(width * groups), width)
        listed = np.frombuffer(take(escapes), np.uint8)
        places = codes == 2**width - 1
        if places.sum() != escapes:
            raise CodecError(f"a coded frame is damaged: {DAMAGE[3]}")
        exponents += codes
        exponents[places] = listed
    mantissa, bits = MANTISSA[dtype], EXPONENT[dtype]
    wide = (rest & (2**mantissa - 1)) | (rest >> mantissa << (mantissa + bits))
    wide |= (exponents[:count].astype(np.uint32) & (2**bits - 1)) << mantissa
    return wide.astype(WORDS[dtype]), at
