"""Codes the exponents of floats, and leaves signs and mantissas as they are.

The exponents of weights and activations take few values, while their mantissas are close to random. DFloat11 (arXiv
2504.11651) and ZipNN (arXiv 2411.05239) code the exponents with Huffman codes. Here a code is the difference from the
base of its tile of 8192 elements, in as many bits as pay for this tile; other exponents are listed behind. That is a
little longer than Huffman codes, but needs no table per element, so every loop is vector code on any CPU.

A frame of coded bytes, little endian:

    check u64 | raw bytes u32 | kind u8 | 3 zero bytes | tiles, then raw bytes that are not a whole element
    tile:  width u8 | base u8 | escapes u16 | signs and mantissas | codes | escapes, one byte each
           width 0: all exponents are the base; 255: the elements follow as they are

The check is XXH3-64 of all bytes behind it. net/codec/definition.py defines every byte.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from net import compiled

SOURCE = Path(__file__).with_name("exponents.c")

KINDS = {"bfloat16": 1, "float16": 2, "float32": 3}
"""Element types that can be coded, with their numbers in frames."""

NAMES = {number: name for name, number in KINDS.items()}
CHECK = Struct("<Q")
FIELDS = Struct("<IB3x")
HEAD_BYTES = CHECK.size + FIELDS.size
DAMAGE = {
    1: "it ends early",
    2: "a tile has codes of an unknown width",
    3: "a tile has not the listed number of escapes",
    4: "bytes follow its last tile",
}
TRIAL_BYTES = 1 << 20
TRIALS = 3

Bytes = NDArray[np.uint8]


class CodecError(ValueError):
    """The bytes are not a frame of this coder, or they are damaged."""


class Exponents:
    """The coder for elements of one type. It decodes frames of every type. Calls release the interpreter lock."""

    def __init__(self, dtype: str) -> None:
        """dtype: a key of KINDS. May compile the C code, which takes a second. Raises NotCompiled."""
        self._kind = KINDS[dtype]
        library = compiled.library(SOURCE, for_this_cpu=True)
        self._bound, self._encode, self._decode = library.bound, library.encode, library.decode
        self._bound.restype, self._bound.argtypes = c_size_t, [c_size_t]
        self._encode.restype, self._encode.argtypes = c_size_t, [c_void_p, c_size_t, c_int, c_void_p]
        self._decode.restype = c_int
        self._decode.argtypes = [c_void_p, c_size_t, c_int, c_void_p, c_size_t]

    def encode(self, views: Sequence[memoryview]) -> memoryview:
        """The bytes of all views, in order, as one frame in memory of its own. It may be longer than the bytes."""
        raw = np.frombuffer(views[0] if len(views) == 1 else b"".join(views), np.uint8)
        out = np.empty(HEAD_BYTES + self._bound(len(raw)), np.uint8)
        size = HEAD_BYTES + self._encode(raw.ctypes.data, len(raw), self._kind, out.ctypes.data + HEAD_BYTES)
        frame = out.data[:size]
        FIELDS.pack_into(frame, CHECK.size, len(raw), self._kind)
        CHECK.pack_into(frame, 0, xxh3_64_intdigest(frame[CHECK.size :]))
        return frame

    def decode(self, frame: memoryview, views: Sequence[memoryview]) -> None:
        """Write the bytes of a frame into `views`, which have exactly as many. Raises CodecError; the views may then
        have been written in part."""
        room = sum(map(len, views))
        kind = opened(frame, room)
        out = np.frombuffer(views[0], np.uint8) if len(views) == 1 else np.empty(room, np.uint8)
        coded = np.frombuffer(frame, np.uint8)[HEAD_BYTES:]
        damage = self._decode(coded.ctypes.data, len(coded), kind, out.ctypes.data, room)
        if damage:
            raise CodecError(f"a coded frame is damaged: {DAMAGE[damage]}")
        if len(views) > 1:
            scatter(out, views)

    def rates(self) -> tuple[float, float]:
        """Raw bytes per second of encoding and of decoding here, on made-up values: the best of TRIALS."""
        name = NAMES[self._kind]
        values = np.random.default_rng(0).standard_normal(TRIAL_BYTES // 4, np.float32)
        raw = (
            (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            if name == "bfloat16"
            else values.astype(name).view(np.uint8)
        )
        source, target = raw.data, np.empty(raw.nbytes, np.uint8).data
        best = [float("inf"), float("inf")]
        for _ in range(TRIALS):
            began = time.perf_counter()
            frame = self.encode([source])
            between = time.perf_counter()
            self.decode(frame, [target])
            seconds = between - began, time.perf_counter() - between
            best = [min(pair) for pair in zip(best, seconds, strict=True)]
        return raw.nbytes / best[0], raw.nbytes / best[1]


def opened(frame: memoryview, room: int) -> int:
    """The kind of an intact frame of `room` raw bytes. Raises CodecError."""
    if len(frame) < HEAD_BYTES:
        raise CodecError(f"a coded frame has only {len(frame)} bytes")
    (check,) = CHECK.unpack_from(frame)
    if check != xxh3_64_intdigest(frame[CHECK.size :]):
        raise CodecError("a coded frame is damaged: its check does not match")
    nbytes, kind = FIELDS.unpack_from(frame, CHECK.size)
    if nbytes != room:
        raise CodecError(f"a coded frame holds {nbytes} bytes, not {room}")
    if kind not in NAMES:
        raise CodecError(f"a coded frame has elements of the unknown kind {kind}")
    return int(kind)


def scatter(data: Bytes, views: Sequence[memoryview]) -> None:
    """Write data into the views, in order."""
    source, at = data.data, 0
    for view in views:
        view[:] = source[at : at + len(view)]
        at += len(view)
