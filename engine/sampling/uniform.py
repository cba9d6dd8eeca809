"""The random numbers of a request: hashes of (seed, position), so that a token does not depend on the node or batch
that computes it. Pure."""

from __future__ import annotations

import struct
from hashlib import blake2b


def uniform(seed: int, position: int, purpose: bytes = b"draw") -> float:
    """A number in [0, 1) for the token at `position` of a request with this seed; `purpose` names independent streams.

    It has 52 bits, so that its product with any float64 total stays below the total.
    """
    digest = blake2b(struct.pack("<qq", seed, position), digest_size=8, person=b"mooncake-" + purpose).digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52
