"""Coded frames (net/codec/): the C decoder against the definition, over the same bytes.

A mutation behind the check would only show that the check works. So the check is made right again first, and the
decoder has to find out by itself that the bytes are no frame. Both must write the same bytes, or refuse both. The
memory around the decoder's output must stay as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from xxhash import xxh3_64_intdigest

from net.codec.definition import decoded, encoded
from net.codec.exponents import CHECK, FIELDS, HEAD_BYTES, CodecError, Exponents

RAW_MAX = 64 << 10  # bytes: the definition is slow
GUARD = 256  # bytes on each side
PATTERN = 0xA5


class CodedTarget:
    """One coder; each input stands alone."""

    def __init__(self) -> None:
        self._coder = Exponents("bfloat16")

    @staticmethod
    def corpus() -> list[bytes]:
        rng = np.random.default_rng(5)
        normal = rng.standard_normal(5000, np.float32)
        raws = {
            "bfloat16": (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes() + b"odd",
            "float16": normal[:1001].astype(np.float16).tobytes(),
            "float32": normal[:1003].tobytes() + bytes(400),
        }
        frames = [encoded(raw, dtype) for dtype, raw in raws.items()]
        return [*frames, encoded(bytes(300), "bfloat16"), encoded(rng.bytes(300), "float16")]

    def feed(self, data: bytes) -> bytes:
        """The raw bytes of a frame whose check is made right first. Raises CodecError."""
        if len(data) < HEAD_BYTES:
            raise CodecError(f"a coded frame has only {len(data)} bytes")
        nbytes, _ = FIELDS.unpack_from(data, CHECK.size)
        if nbytes > RAW_MAX:
            raise CodecError(f"a coded frame holds {nbytes} bytes, more than {RAW_MAX}")
        frame = CHECK.pack(xxh3_64_intdigest(data[CHECK.size :])) + data[CHECK.size :]
        wanted = _result(lambda: decoded(frame, nbytes))
        memory = np.full(nbytes + 2 * GUARD, PATTERN, np.uint8)

        def decode() -> bytes:
            self._coder.decode(memoryview(frame), [memory.data[GUARD : GUARD + nbytes]])
            return memory[GUARD : GUARD + nbytes].tobytes()

        found = _result(decode)
        if not (memory[:GUARD] == PATTERN).all() or not (memory[GUARD + nbytes :] == PATTERN).all():
            raise AssertionError("the decoder wrote outside its output")
        if (wanted is None) != (found is None) or (wanted is not None and wanted != found):
            raise AssertionError("the decoder and its definition differ")
        if found is None:
            raise CodecError("both refuse it")
        return found


def _result(decode: Callable[[], bytes]) -> bytes | None:
    """None: refused."""
    try:
        return decode()
    except CodecError:
        return None
