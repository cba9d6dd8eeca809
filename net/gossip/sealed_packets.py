"""Sealed datagrams: gossip encrypted and authenticated with the cluster key; each one is accepted once. Pure.

    "Ms" | key id 4 | session 12 | counter u64 | AES-256-GCM of the packet with the header as associated data, tag 16

Every process draws a random session and counts its packets. The AES key is derived from the cluster key and the
session, so no two processes use the same nonce with the same key. A receiver keeps a window of counters per session and
drops a packet that arrives twice or after the window has passed it. A restarted receiver has no windows, so it accepts
a recorded packet once more; incarnations and versions in the packet make it stale.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from struct import Struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from net.channel.keyring import ID_BYTES, Key, Keyring

MAGIC = b"Ms"
SESSION_BYTES = 12
TAG_BYTES = 16
OVERHEAD_BYTES = len(MAGIC) + ID_BYTES + SESSION_BYTES + 8 + TAG_BYTES
WINDOW_PACKETS = 1024  # packets that may overtake each other
SESSIONS_MAX = 4096  # senders with a window; the sender with the oldest last packet is dropped first

_HEADER = Struct(f"<2s{ID_BYTES}s{SESSION_BYTES}sQ")


class SealError(Exception):
    """A datagram is dropped; `str` is the short reason under which it is counted."""


@dataclass(slots=True)
class Window:
    """Which counters of one sender have been seen."""

    top: int = -1  # the highest seen
    seen: int = 0  # bit i: top - i was seen

    def accept(self, counter: int) -> bool:
        """Whether `counter` is new; also False if it is too old to tell."""
        ahead = counter - self.top
        if ahead > 0:
            self.seen = ((self.seen << ahead) | 1) & ((1 << WINDOW_PACKETS) - 1) if ahead < WINDOW_PACKETS else 1
            self.top = counter
            return True
        if -ahead >= WINDOW_PACKETS or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


@dataclass(slots=True)
class _Sender:
    cipher: AESGCM
    window: Window = field(default_factory=Window)


class PacketSeal:
    """One process's end. `session`: SESSION_BYTES random bytes, drawn once per process. Every call takes the keyring,
    because it may have changed since the last call."""

    def __init__(self, session: bytes) -> None:
        if len(session) != SESSION_BYTES:
            raise ValueError(f"a session has {SESSION_BYTES} bytes, got {len(session)}")
        self._session = session
        self._counter = 0
        self._ours: tuple[Key, AESGCM] | None = None
        self._senders: OrderedDict[tuple[bytes, bytes], _Sender] = OrderedDict()  # (key secret, session)

    def seal(self, ring: Keyring, packet: bytes) -> bytes:
        """The datagram, OVERHEAD_BYTES longer than the packet."""
        if self._ours is None or self._ours[0] != ring.primary:
            self._ours = (ring.primary, _cipher(ring.primary, self._session))
        key, cipher = self._ours
        header = _HEADER.pack(MAGIC, key.id, self._session, self._counter)
        nonce = self._counter.to_bytes(12, "little")
        self._counter += 1
        return header + cipher.encrypt(nonce, packet, header)

    def open(self, ring: Keyring, datagram: bytes) -> bytes:
        """The packet. Raises SealError with "no key", "other key", "forged" or "replayed"."""
        if len(datagram) < OVERHEAD_BYTES or datagram[: len(MAGIC)] != MAGIC:
            raise SealError("no key")
        header = datagram[: _HEADER.size]
        _, key_id, session, counter = _HEADER.unpack(header)
        key = ring.find(key_id)
        if key is None:
            raise SealError("other key")
        sender = self._senders.get((key.secret, session))
        known = sender is not None
        if sender is None:
            sender = _Sender(_cipher(key, session))
        try:
            packet = sender.cipher.decrypt(counter.to_bytes(12, "little"), datagram[_HEADER.size :], header)
        except InvalidTag:
            raise SealError("forged") from None
        if not known:
            self._senders[key.secret, session] = sender
            if len(self._senders) > SESSIONS_MAX:
                self._senders.popitem(last=False)
        self._senders.move_to_end((key.secret, session))
        if not sender.window.accept(counter):
            raise SealError("replayed")
        return packet


def _cipher(key: Key, session: bytes) -> AESGCM:
    return AESGCM(key.derive(b"gossip", session, 32))
