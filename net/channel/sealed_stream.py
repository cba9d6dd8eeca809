"""Sealed streams: a TCP connection encrypted and authenticated with the cluster key. Pure.

    dialing side                                         accepting side
    "Mk3y" | version | n | X25519 key 32 | n key ids  ──>  the first of the keys that it has, too
              <──  "Mk3y" | version | index of that key | X25519 key 32
    records in both directions, from here on

A record is its length (u32, little endian) and AES-256-GCM of at most RECORD_MAX bytes with a tag of 16 bytes;
the nonce counts the records. The two AES keys, one per direction, are derived (HKDF) from the cluster key, the X25519
secret and both greetings. Each side draws a fresh X25519 key, so records of earlier connections do not open here, and
no record can be repeated, omitted or moved. An attacker who learns the cluster key later cannot read recorded traffic.
The hellos are the first records: forging one that opens requires the cluster key.

A record is sealed and opened in the thread of the event loop, one after the other. AES-GCM itself runs without the
interpreter lock, so other Python threads continue; this loop and its other connections wait for each record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from struct import Struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from net.channel.keyring import ID_BYTES, KEYS_MAX, Key, Keyring
from net.channel.wire import MAGIC as PLAIN_MAGIC
from net.channel.wire import (
    SEALED_MAGIC,
    STAGING_MIN,
    Buffer,
    Decoder,
    Frame,
    FrameError,
    KeyMismatch,
    nbytes_of,
    staging_of,
)
from net.errors import ONE_KEY, OTHER_KEY

VERSION = 1
RECORD_MAX = 128 << 10  # bytes of plaintext of one record: fits the second-level cache between cipher and socket
TAG_BYTES = 16
JOIN_MAX = 16 << 10  # bytes: smaller pieces are copied into one record instead of getting separate records
STAGING_BYTES = 4 * (RECORD_MAX + TAG_BYTES + 4)

_GREETING = Struct("<4sBB32s")
_LENGTH = Struct("<I")


class SealedStream:
    """One end of one connection. Feed arriving bytes through `buffer` and `frames`; seal nothing before `ready`.
    `private`: 32 fresh random bytes."""

    def __init__(self, ring: Keyring, dialed: bool, private: bytes) -> None:
        self.ready = False
        self.answer = b""  # the accepting side must send it before its first record
        self._ring = ring
        self._dialed = dialed
        self._private = X25519PrivateKey.from_private_bytes(private)
        self._offered = [key.id for key in ring.keys]
        self._staging = memoryview(bytearray(STAGING_MIN))  # grows with arriving bytes until a record has opened
        self._start = self._end = 0
        self._refused = False  # a dialed peer answers in plain frames: these may only contain its reason to refuse us
        self._sent = self._received = 0  # records
        self._ours: AESGCM | None = None
        self._theirs: AESGCM | None = None

    def greeting(self) -> bytes:
        """The first bytes that the dialing side sends; empty on the accepting side."""
        if not self._dialed:
            return b""
        public = self._private.public_key().public_bytes_raw()
        return _GREETING.pack(SEALED_MAGIC, VERSION, len(self._offered), public) + b"".join(self._offered)

    # --- sending

    def seal(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """The records of a frame, to be written one after the other. Small pieces share a record."""
        out: list[bytes] = []
        small: list[Buffer] = []
        joined = 0
        for buffer in buffers:
            nbytes = nbytes_of(buffer)
            if nbytes <= JOIN_MAX:
                if joined + nbytes > RECORD_MAX:
                    self._record(b"".join(small), out)
                    small, joined = [], 0
                small.append(buffer)
                joined += nbytes
                continue
            if joined:
                self._record(b"".join(small), out)
                small, joined = [], 0
            view = memoryview(buffer)
            for start in range(0, nbytes, RECORD_MAX):
                self._record(view[start : start + RECORD_MAX], out)
        if joined:
            self._record(b"".join(small), out)
        return out

    def _record(self, plain: Buffer, out: list[bytes]) -> None:
        assert self._ours is not None
        out.append(_LENGTH.pack(nbytes_of(plain) + TAG_BYTES))
        out.append(self._ours.encrypt(self._sent.to_bytes(12, "little"), plain, None))
        self._sent += 1

    # --- receiving

    def close(self) -> None:
        """The stream has ended, and gives its buffer back."""
        self._staging = memoryview(b"")

    def buffer(self) -> memoryview:
        """The destination of the connection's next bytes; never empty. Valid until `frames`."""
        return self._staging[self._end :]

    def frames(self, nbytes: int, decoder: Decoder) -> Iterator[Frame]:
        """The frames completed by `nbytes` more bytes in `buffer()`. Raises FrameError. Consume the whole iterator;
        then check `ready` and `answer`."""
        self._end += nbytes
        if not self.ready and not self._refused and not self._greeted():
            return
        if self._refused:
            yield from self._refusal(decoder)
            return
        while (record := self._next()) is not None:
            yield from self._open(record, decoder)
        self._compact()

    def _next(self) -> memoryview | None:
        """The next record in the staging buffer."""
        have = self._end - self._start
        if have < _LENGTH.size:
            return None
        (nbytes,) = _LENGTH.unpack_from(self._staging, self._start)
        if not TAG_BYTES < nbytes <= RECORD_MAX + TAG_BYTES:
            raise FrameError(
                f"a sealed record of {nbytes} bytes is not between {TAG_BYTES + 1} and {RECORD_MAX + TAG_BYTES}"
            )
        if have < _LENGTH.size + nbytes:
            self._reserve(_LENGTH.size + nbytes)
            return None
        begin = self._start + _LENGTH.size
        self._start = begin + nbytes
        return self._staging[begin : self._start]

    def _reserve(self, needed: int) -> None:
        """Make room for a record. A peer that has not proved the key gets at most twice the memory that it filled."""
        size = STAGING_BYTES if self._received else min(needed, max(STAGING_MIN, 2 * (self._end - self._start)))
        if size > len(self._staging):
            self._compact()
            grown = staging_of(size)
            grown[: self._end] = self._staging[: self._end]
            self._staging = grown

    def _open(self, record: memoryview, decoder: Decoder) -> Iterator[Frame]:
        """Decrypts directly into the destination if it is large enough. A forged record may write to the memory of a
        transfer that then fails, but never to one that completes."""
        assert self._theirs is not None
        nonce, nbytes = self._received.to_bytes(12, "little"), len(record) - TAG_BYTES
        self._received += 1
        target = decoder.buffer()
        try:
            if len(target) >= nbytes:
                self._theirs.decrypt_into(nonce, record, None, target[:nbytes])
                yield from decoder.received(nbytes)
                return
            plain = memoryview(self._theirs.decrypt(nonce, record, None))
        except InvalidTag:
            raise FrameError("a record is not sealed with this connection's key") from None
        while plain:
            count = min(len(plain), len(target))
            target[:count] = plain[:count]
            plain = plain[count:]
            yield from decoder.received(count)
            target = decoder.buffer()

    def _compact(self) -> None:
        left = self._end - self._start
        if self._start:
            self._staging[:left] = bytes(self._staging[self._start : self._end])
            self._start, self._end = 0, left

    # --- the greetings

    def _greeted(self) -> bool:
        """Take the peer's greeting; False if more bytes are needed."""
        data = bytes(self._staging[: self._end])
        magic = data[: len(SEALED_MAGIC)]
        if magic != SEALED_MAGIC[: len(magic)]:
            if magic != PLAIN_MAGIC[: len(magic)]:
                raise FrameError(f"not a mooncake stream: it starts with {magic!r}")
            if not self._dialed:
                raise KeyMismatch(ONE_KEY)
            self._refused = True
            return True
        if len(data) < _GREETING.size:
            return False
        _, version, number, public = _GREETING.unpack_from(data)
        if version != VERSION:
            raise FrameError(
                f"the peer uses seal version {version}, this node uses {VERSION}: run the same release on all nodes"
            )
        size = _GREETING.size if self._dialed else _GREETING.size + number * ID_BYTES
        if not self._dialed and not 1 <= number <= KEYS_MAX:
            raise FrameError(f"a greeting names {number} keys")
        if len(data) < size:
            return False
        self._start = size
        if self._dialed:
            self._agree(self._chosen(number), public, self.greeting(), data[:size])
        else:
            found = self._ring.common([data[i : i + ID_BYTES] for i in range(_GREETING.size, size, ID_BYTES)])
            if found is None:
                raise KeyMismatch(OTHER_KEY)
            self.answer = _GREETING.pack(SEALED_MAGIC, VERSION, found[0], self._private.public_key().public_bytes_raw())
            self._agree(found[1], public, data[:size], self.answer)
        return True

    def _chosen(self, index: int) -> Key:
        if index >= len(self._offered):
            raise FrameError("the peer chose a key that was not offered")
        return self._ring.keys[index]

    def _agree(self, key: Key, public: bytes, dialer: bytes, acceptor: bytes) -> None:
        try:
            secret = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise FrameError("a greeting has an unusable X25519 key") from None
        both = key.derive(b"stream", sha256(dialer + acceptor).digest(), 64, secret)
        first, second = AESGCM(both[:32]), AESGCM(both[32:])
        self._ours, self._theirs = (first, second) if self._dialed else (second, first)
        self.ready = True

    def _refusal(self, decoder: Decoder) -> Iterator[Frame]:
        """An unsealed answer may only contain the reason why the peer refuses us."""
        data, self._end = bytes(self._staging[: self._end]), 0
        while data:
            target = decoder.buffer()
            count = min(len(data), len(target))
            target[:count] = data[:count]
            data = data[count:]
            for frame in decoder.received(count):
                if "refused" not in frame.header:
                    raise KeyMismatch(ONE_KEY)
                yield frame
