"""Frames: splits a byte stream between two nodes into messages. Pure: no sockets, no clock.

    offset  0      4         5    8               12     16               24
            magic  version   0    header length   0      payload length   header (a JSON object), then payload (raw)
            4s     u8        3x   u32             4x     u64              all little endian

The decoder gives its caller the destination of the next bytes (`buffer`), so a socket reads large payloads directly
into their destination. Small pieces pass through a staging buffer: one read fills many of them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import orjson

from net.errors import ONE_KEY

Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]

MAGIC = b"MOON"
SEALED_MAGIC = b"Mk3y"  # begins a connection sealed with the cluster key: net.channel.sealed_stream
VERSION = 1
PREFIX = Struct("<4sB3xI4xQ")
HEADER_MAX = 16 << 20  # bytes
PAYLOAD_MAX = 256 << 20  # bytes of a payload without a given destination
STAGING_BYTES = 256 << 10
DIRECT_MIN = 64 << 10  # bytes: smaller pieces are staged, because a read per piece would cost more than the copy
REST_MIN = 16 << 10  # bytes: a smaller rest of a large piece is also staged, together with the following bytes
STAGING_MIN = 2 << 10  # bytes, for a peer that has not sent its hello
READ_MAX = 2 << 20  # bytes: bounds how long one read holds the event loop, about 0.7 ms
ALIGN = 64
"""Bytes: heads are padded with spaces to a multiple, so that the payload stays aligned in the kernel's buffers: its two
copies need 4 % less CPU."""
READ_AHEAD_BYTES = PREFIX.size + 488  # read before a payload that will be placed directly


class FrameError(ValueError):
    """The stream is not Mooncake's, is damaged, or needs more memory than allowed; it cannot be read further."""


class KeyMismatch(FrameError):
    """The peer is a Mooncake node, but has a different cluster key, or only one side has a key. The text fits both."""


@dataclass(slots=True)
class Frame:
    """One message: its header and the current location of its payload."""

    header: Header
    payload: Sequence[memoryview]

    @property
    def data(self) -> memoryview:
        """The payload of a frame that was not scattered."""
        return self.payload[0] if self.payload else memoryview(b"")


Place = Callable[[Header, int], Sequence[memoryview]]
"""(header, payload bytes) -> writable views of exactly that many bytes, filled in order. Raises FrameError."""


def head(header: Header, payload_nbytes: int = 0) -> bytes:
    """A frame without its payload. Raises TypeError if the header has no JSON form."""
    text = orjson.dumps(header)
    text += b" " * (-(PREFIX.size + len(text)) % ALIGN)
    if len(text) > HEADER_MAX:
        raise FrameError(f"a header of {len(text)} bytes exceeds the limit of {HEADER_MAX}; send it as payload")
    return PREFIX.pack(MAGIC, VERSION, len(text), payload_nbytes) + text


def encode(header: Header, payload: Sequence[Buffer] = ()) -> bytes:
    """A whole frame; copies the payload."""
    return b"".join((head(header, sum(map(nbytes_of, payload))), *payload))


def nbytes_of(buffer: Buffer) -> int:
    """The size in bytes, also of a memoryview with larger items."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def allocate(limit: int = PAYLOAD_MAX) -> Place:
    """A Place that gives every payload fresh memory, up to `limit` bytes."""

    def place(header: Header, nbytes: int) -> Sequence[memoryview]:
        if nbytes > limit:
            raise FrameError(f"a payload of {nbytes} bytes exceeds the limit of {limit}")
        return [memoryview(bytearray(nbytes))]

    return place


def staging_of(nbytes: int) -> memoryview:
    """Memory to read into, of which only what was written takes room: most connections carry small frames, and a node
    has several to each of its peers. A bytearray may lie where others were before, and takes all of its bytes then."""
    if nbytes < STAGING_BYTES:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


_nowhere = memoryview(bytearray(STAGING_BYTES))


def nowhere(nbytes: int) -> list[memoryview]:
    """Views into which a payload is read to be discarded."""
    whole, rest = divmod(nbytes, STAGING_BYTES)
    return [_nowhere] * whole + ([_nowhere[:rest]] if rest else [])


class Decoder:
    """Splits a byte stream into frames. Put bytes into `buffer()`, then iterate `received(n)`. `place` may be replaced
    between two frames."""

    def __init__(self, place: Place, header_max: int = HEADER_MAX, staging: int = STAGING_BYTES) -> None:
        """staging: bytes per read. A smaller value means smaller reads, until `widen`."""
        self.place = place
        self.header_max = header_max
        self.incoming: Frame | None = None  # the frame whose payload is arriving
        self._staging = staging_of(staging)
        self._start = 0  # staged bytes not yet used: _staging[_start:_end]
        self._end = 0
        self._limit = STAGING_BYTES  # end of the staging buffer to read to if a prefix follows
        self._piece = 0  # index of the payload view being filled
        self._filled = 0  # bytes of it that are filled
        self._missing = 0  # payload bytes to come
        self._rest: memoryview | None = None  # of the large piece that is being filled

    def buffer(self) -> memoryview:
        """The destination of the stream's next bytes; never empty. Valid until `received`."""
        rest = self._rest or self._large()
        if rest is not None:
            return rest if len(rest) <= READ_MAX else rest[:READ_MAX]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._staging):
            self._compact()
        if self.incoming is None and self._end < self._limit:
            return self._staging[self._end : self._limit]
        return self._staging[self._end :]

    def _large(self) -> memoryview | None:
        """The rest of a large piece if it is next."""
        if self.incoming is None or self._start != self._end:
            return None
        view = self.incoming.payload[self._piece]
        if len(view) - self._filled < DIRECT_MIN:
            return None
        self._rest = view[self._filled :]
        return self._rest

    def continues(self, nbytes: int) -> bool:
        """A fast `received` for bytes in the middle of one large piece or at the end of one of several, as most of a
        large payload are. Otherwise does nothing and returns False."""
        rest = self._rest
        if rest is None:
            return False
        left = len(rest) - nbytes
        if left >= REST_MIN:
            self._rest = rest[nbytes:]
        elif not left and nbytes < self._missing:
            self._rest = None
            self._piece += 1
            self._filled = 0
        else:
            return False
        self._limit = READ_AHEAD_BYTES
        self._missing -= nbytes
        return True

    def received(self, nbytes: int) -> Iterable[Frame]:
        """The frames completed by `nbytes` more bytes in `buffer()`. Raises FrameError. Consume the whole iterable."""
        rest = self._rest
        if rest is None:
            self._end += nbytes
        else:
            self._advance(rest, nbytes)
        frame = self._next()
        if frame is None:
            return ()
        return (frame,) if self._start == self._end else self._several(frame)

    def _several(self, frame: Frame | None) -> Iterator[Frame]:
        """Parses each frame after the caller has handled the previous one, which may change the destination."""
        while frame is not None:
            yield frame
            frame = self._next()

    def _next(self) -> Frame | None:
        """The next frame that has arrived completely."""
        frame = self.incoming or self._parse()
        if frame is None:
            return None
        if self._missing:
            if self._start < self._end:
                self._unstage(frame)
            if self._missing:
                return None
        self.incoming = None
        return frame

    @property
    def missing(self) -> int:
        """Bytes of the current payload that have not arrived yet."""
        return self._missing

    def discard(self) -> None:
        """Discard the rest of the arriving payload; its destination is not written any more."""
        if self.incoming is not None:
            self.incoming.payload = nowhere(self._missing)
            self._piece = self._filled = 0
            self._rest = None

    def _parse(self) -> Frame | None:
        """Take one prefix and header out of the staging buffer; None if more bytes are needed."""
        start = self._start
        have = self._end - start
        if have < PREFIX.size:
            return None
        magic, version, header_nbytes, missing = PREFIX.unpack_from(self._staging, start)
        if magic != MAGIC or version != VERSION:
            raise _foreign(magic, version)
        if header_nbytes > self.header_max:
            raise FrameError(f"a header of {header_nbytes} bytes exceeds the limit of {self.header_max}")
        needed = PREFIX.size + header_nbytes
        if have < needed:
            self._reserve(needed)
            return None
        try:
            header = orjson.loads(self._staging[start + PREFIX.size : start + needed])
        except orjson.JSONDecodeError as error:
            raise FrameError(f"a frame header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise FrameError("a frame header is not a JSON object")
        self._start = start + needed
        payload: Sequence[memoryview] = ()
        if missing:
            payload = self.place(header, missing)
            if (room := sum(map(len, payload))) != missing:
                raise FrameError(f"a payload of {missing} bytes got a buffer of {room} bytes")
        self._missing, self._piece, self._filled = missing, 0, 0
        self._limit = STAGING_BYTES
        frame = self.incoming = Frame(header, payload)
        return frame

    def close(self) -> None:
        """The stream has ended, and gives its buffer back."""
        self._staging = memoryview(b"")

    def widen(self) -> None:
        """The peer has sent its hello: read in large pieces."""
        self._grow(STAGING_BYTES)

    def _reserve(self, needed: int) -> None:
        """Make room step by step for a header longer than the staging buffer: a stranger gets at most twice the memory
        that it filled."""
        self._grow(min(needed, 2 * (self._end - self._start)))

    def _grow(self, size: int) -> None:
        if size > len(self._staging):
            grown = staging_of(size)
            staged = self._end - self._start
            grown[:staged] = self._staging[self._start : self._end]
            self._staging, self._start, self._end = grown, 0, staged

    def _compact(self) -> None:
        staged = self._end - self._start
        self._staging[:staged] = bytes(self._staging[self._start : self._end])
        self._start, self._end = 0, staged

    def _unstage(self, frame: Frame) -> None:
        """Copy staged bytes to the payload's destination."""
        staging, start, piece, filled = self._staging, self._start, self._piece, self._filled
        end = self._start = min(self._end, start + self._missing)
        self._missing -= end - start
        for view in frame.payload[piece:]:
            stop = start + len(view) - filled
            if stop > end:
                view[filled : filled + end - start] = staging[start:end]
                filled += end - start
                break
            view[filled:] = staging[start:stop]
            piece += 1
            start, filled = stop, 0
        self._piece, self._filled = piece, filled

    def _advance(self, rest: memoryview, nbytes: int) -> None:
        """The bytes were read directly into `rest`, the rest of a large piece."""
        assert self.incoming is not None
        self._limit = READ_AHEAD_BYTES
        self._missing -= nbytes
        left = len(rest) - nbytes
        self._rest = rest[nbytes:] if left >= REST_MIN else None
        if left:
            self._filled = len(self.incoming.payload[self._piece]) - left
        else:
            self._piece += 1
            self._filled = 0


def _foreign(magic: bytes, version: int) -> FrameError:
    if magic == SEALED_MAGIC:
        return KeyMismatch(ONE_KEY)
    if magic != MAGIC:
        return FrameError(f"not a mooncake stream: it starts with {magic!r}")
    return FrameError(
        f"the peer uses wire version {version}, this node uses {VERSION}: run the same release on all nodes"
    )
