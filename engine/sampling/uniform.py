"""The random numbers of a request: hashes of (seed, position). So a token does not depend on the node or batch that
computes it. Pure."""

from __future__ import annotations

import struct
from hashlib import blake2b


def stream_key(seed: int, position: int, purpose: bytes = b"draw") -> int:
    """A signed 64-bit number for the token at `position` of a request with this seed; `purpose` names independent
    streams."""
    digest = blake2b(struct.pack("<qq", seed, position), digest_size=8, person=b"mooncake-" + purpose).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(seed: int, position: int, purpose: bytes) -> float:
    """A number in [0, 1) with 52 bits; arguments as of `stream_key`."""
    return ((stream_key(seed, position, purpose) % 2**64) >> 12) * 2.0**-52
