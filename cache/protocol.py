"""The common parts of questions and answers about pooled blocks: answer codes, deadlines, keys on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.block import KEY_BYTES, BlockKey
from net.errors import RemoteError

STORED, PRESENT = 0, -1
"""Returned instead of a slot to write. PRESENT: the block is here, is being written, or is refused by admission."""

OTHER, WRITING, GONE = -3, -4, -5
"""The same if contents are compared. OTHER: another content is here and stays. WRITING: not known yet, because the
block is being written, there is no room to replace it, or another content is on a disk that cannot be read now. GONE:
that content was removed."""

OVER = -6
"""The same for a new block: its tenant has as much as it may have here (--tenants)."""

ABSENT, ELSEWHERE = -1, -2
"""Returned instead of a slot to read. ABSENT: the block is not here. ELSEWHERE: it is not here, but this home has sent
its writer to the next member."""

KEPT, PINS_FULL = 0, -2
"""Answers to a request to keep a block: KEPT, PINS_FULL (the limit of this home, --pin-share, is reached), or
ABSENT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. A lease lasts longer than its messages and its transfer."""

    lookup_s: float = 2.0  # answer to store.has
    control_s: float = 3.0  # answer to pin (it may read from SSD), reserve, commit; first bytes of a get
    transfer_s: float = 10.0
    lease_s: float = 45.0
    room_s: float = 2.0  # a request for slots waits this long for a write to SSD to free one
    shun_s: float = 1.0  # a home that did not answer in time is not asked again for this long
    flush_s: float = 60.0  # answer to flush
    durable_s: float = 30.0  # answer to a request to put blocks on SSD and sync them there
    slowest_bytes_per_s: float = 4e6  # assumed speed of a put over TCP: its time is added to control_s

    @classmethod
    def answered_within(cls, seconds: float) -> Deadlines:
        """Deadlines for homes that get `seconds` to answer (--store-timeout-ms)."""
        usual = cls()
        return cls(lookup_s=min(usual.lookup_s, seconds), control_s=seconds, room_s=min(usual.room_s, seconds * 2 / 3))


def join_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys on the wire: 16 bytes each, after the header."""
    return b"".join(keys)


def split_keys(data: bytes | memoryview) -> list[BlockKey]:
    """Inverse of `join_keys`. Raises RemoteError when it is not a whole number of keys."""
    raw = bytes(data)
    if len(raw) % KEY_BYTES:
        raise RemoteError(f"{len(raw)} bytes are not block keys", "bad_request")
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
