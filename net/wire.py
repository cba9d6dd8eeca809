"""Frames: how a byte stream between two nodes is cut into messages. Pure: no sockets, no clock.

    offset  0      4         5    8               12     16               24
            magic  version   0    header length   0      payload length   header (a JSON object), then payload (raw)
            4s     u8        3x   u32             4x     u64              all little endian

The decoder tells its caller where to put the next bytes (`buffer`), so a socket reads large payloads straight into
their destination. Small pieces go through a staging buffer instead: one read then fills many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import orjson

from net.errors import ONE_KEY

Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]

MAGIC = b"MOON"
SEALED_MAGIC = b"Mk3y"  # how a connection begins that the cluster key seals: net.sealed_stream
VERSION = 1
PREFIX = Struct("<4sB3xI4xQ")
HEADER_MAX = 16 << 20  # bytes
PAYLOAD_MAX = 256 << 20  # bytes of a payload nobody gave a place for
STAGING = 256 << 10  # bytes
DIRECT_MIN = 64 << 10  # bytes: smaller pieces are staged, a read per piece would cost more than the copy
READ_MAX = 2 << 20  # bytes: bounds how long one read holds the event loop, about 0.7 ms
ALIGN = 64
"""Bytes: heads are padded with spaces to a multiple, so that payload keeps its alignment in the kernel's buffers: 4 %
less CPU for its two copies."""
LOOK = PREFIX.size + 488  # bytes read ahead of a payload that will be placed directly


class FrameError(ValueError):
    """The stream is not ours, is damaged, or asks for more memory than allowed; it cannot be read any further."""


class KeyMismatch(FrameError):
    """One of ours, but of another cluster key, or of none where we have one. The text fits both sides."""


@dataclass(slots=True)
class Frame:
    """One message: its header and where its payload is now."""

    header: Header
    payload: list[memoryview] = field(default_factory=list)

    @property
    def data(self) -> memoryview:
        """The payload of a frame that was not scattered."""
        return self.payload[0] if self.payload else memoryview(b"")


Place = Callable[[Header, int], Sequence[memoryview]]
"""(header, payload bytes) -> writable views of exactly that many bytes, filled in order. Raises FrameError."""


def head(header: Header, payload_nbytes: int = 0) -> bytes:
    """Everything of a frame but its payload. Raises TypeError when the header has no JSON form."""
    text = orjson.dumps(header)
    text += b" " * (-(PREFIX.size + len(text)) % ALIGN)
    if len(text) > HEADER_MAX:
        raise FrameError(f"a header of {len(text)} bytes is over the limit of {HEADER_MAX}; send it as payload")
    return PREFIX.pack(MAGIC, VERSION, len(text), payload_nbytes) + text


def encode(header: Header, payload: Sequence[Buffer] = ()) -> bytes:
    """A whole frame, the payload copied."""
    return b"".join((head(header, sum(map(nbytes_of, payload))), *payload))


def nbytes_of(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def allocate(limit: int = PAYLOAD_MAX) -> Place:
    """A Place that gives every payload fresh memory, up to `limit` bytes."""

    def place(header: Header, nbytes: int) -> Sequence[memoryview]:
        if nbytes > limit:
            raise FrameError(f"a payload of {nbytes} bytes is over the limit of {limit}")
        return [memoryview(bytearray(nbytes))]

    return place


_nowhere = memoryview(bytearray(STAGING))


def nowhere(nbytes: int) -> list[memoryview]:
    """Views whose content nobody reads, for a payload to be thrown away."""
    whole, rest = divmod(nbytes, STAGING)
    return [_nowhere] * whole + ([_nowhere[:rest]] if rest else [])


class Decoder:
    """Cuts a byte stream into frames. Put bytes into `buffer()`, then iterate `received(n)`; `place` may be replaced
    between two frames."""

    def __init__(self, place: Place, header_max: int = HEADER_MAX) -> None:
        self.place = place
        self.header_max = header_max
        self.incoming: Frame | None = None  # the frame whose payload is arriving
        self._staging = memoryview(bytearray(STAGING))
        self._start = 0  # staged bytes not yet used: _staging[_start:_end]
        self._end = 0
        self._limit = STAGING  # how far to read when a prefix comes next
        self._piece = 0  # the payload view being filled, and how much of it is
        self._filled = 0
        self._missing = 0  # payload bytes to come
        self._direct = False

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty. Valid until `received`."""
        self._direct = False
        if self.incoming is not None and self._start == self._end:
            view = self.incoming.payload[self._piece]
            if len(view) - self._filled >= DIRECT_MIN:
                self._direct = True
                return view[self._filled : self._filled + READ_MAX]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._staging):
            self._compact()
        if self.incoming is None and self._end < self._limit:
            return self._staging[self._end : self._limit]
        return self._staging[self._end :]

    def continues(self, nbytes: int) -> bool:
        """The same as `received` in little time, where these bytes are in the middle of one large piece, as most of a
        large payload are; False, and nothing is done, where they are not."""
        if not self._direct or self.incoming is None:
            return False
        if self._filled + nbytes >= len(self.incoming.payload[self._piece]):
            return False
        self._direct = False
        self._limit = LOOK
        self._filled += nbytes
        self._missing -= nbytes
        return True

    def received(self, nbytes: int) -> Iterator[Frame]:
        """The frames completed by `nbytes` more bytes in `buffer()`. Raises FrameError. Consume it whole."""
        if self._direct:
            self._direct = False
            self._limit = LOOK
            self._advance(nbytes)
        else:
            self._end += nbytes
        while True:
            if self.incoming is None and not self._parse():
                return
            if self._missing:
                self._unstage()
                if self._missing:
                    return
            frame = self.incoming
            assert frame is not None
            self.incoming = None
            yield frame

    def discard(self) -> None:
        """Throw the rest of the arriving payload away; its destination is not written any more."""
        if self.incoming is not None:
            self.incoming.payload = nowhere(self._missing)
            self._piece = self._filled = 0

    def _parse(self) -> bool:
        """Take one prefix and header out of the staging buffer; False when more bytes are needed."""
        have = self._end - self._start
        if have < PREFIX.size:
            return False
        magic, version, header_nbytes, payload_nbytes = PREFIX.unpack_from(self._staging, self._start)
        if magic == SEALED_MAGIC:
            raise KeyMismatch(ONE_KEY)
        if magic != MAGIC:
            raise FrameError(f"not a mooncake stream: it starts with {bytes(magic)!r}")
        if version != VERSION:
            raise FrameError(f"the peer speaks wire version {version}, this node {VERSION}: run one release everywhere")
        if header_nbytes > self.header_max:
            raise FrameError(f"a header of {header_nbytes} bytes is over the limit of {self.header_max}")
        needed = PREFIX.size + header_nbytes
        if have < needed:
            self._reserve(needed)
            return False
        header = _header(self._staging[self._start + PREFIX.size : self._start + needed])
        self._start += needed
        payload = list(self.place(header, payload_nbytes)) if payload_nbytes else []
        if sum(map(len, payload)) != payload_nbytes:
            raise FrameError(f"a payload of {payload_nbytes} bytes was given {sum(map(len, payload))} bytes of room")
        self.incoming = Frame(header, payload)
        self._missing, self._piece, self._filled = payload_nbytes, 0, 0
        self._limit = STAGING
        return True

    def _reserve(self, needed: int) -> None:
        """Make room for a header that is longer than the staging buffer."""
        if needed > len(self._staging):
            grown = memoryview(bytearray(needed))
            staged = self._end - self._start
            grown[:staged] = self._staging[self._start : self._end]
            self._staging, self._start, self._end = grown, 0, staged

    def _compact(self) -> None:
        staged = self._end - self._start
        self._staging[:staged] = bytes(self._staging[self._start : self._end])
        self._start, self._end = 0, staged

    def _unstage(self) -> None:
        """Copy staged bytes to where the payload belongs."""
        assert self.incoming is not None
        payload, staging = self.incoming.payload, self._staging
        while self._missing and self._start < self._end:
            view = payload[self._piece]
            count = min(len(view) - self._filled, self._end - self._start)
            view[self._filled : self._filled + count] = staging[self._start : self._start + count]
            self._start += count
            self._advance(count)

    def _advance(self, nbytes: int) -> None:
        assert self.incoming is not None
        self._missing -= nbytes
        self._filled += nbytes
        if self._filled == len(self.incoming.payload[self._piece]):
            self._piece += 1
            self._filled = 0


def _header(text: memoryview) -> Header:
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"a frame header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError("a frame header is not a JSON object")
    return header
