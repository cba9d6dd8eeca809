"""Note: 20 bytes stored with a block's content: facts for the policies, and whether the block is kept.

Zeros mean unknown, so that rows of versions without facts can be read.
"""

from __future__ import annotations

from struct import Struct

from cache.pool.policy import PLAIN, Facts

NOTE = Struct("<fI12s")  # cost in seconds, position and the flag, class
KEPT = 1 << 31
CLASS_BYTES = 12  # longer names are truncated


def pack(facts: Facts, kept: bool) -> bytes:
    position = min(max(facts.position, 0), KEPT - 1) | (KEPT if kept else 0)
    return NOTE.pack(max(facts.cost_s, 1e-30), position, facts.service_class.encode()[:CLASS_BYTES])


def unpack(note: bytes) -> tuple[Facts, bool]:
    """(facts, kept) from any 20 bytes; never raises."""
    cost_s, position, name = NOTE.unpack(note)
    kept = bool(position & KEPT)
    if not 0.0 < cost_s < float("inf"):
        return PLAIN, kept
    return Facts(position & (KEPT - 1), cost_s, name.rstrip(b"\0").decode(errors="replace")), kept
