"""Tenants of the pool: a key of named values begins with the space of its tenant, so the key tells whose it is. Pure.

cache/named/names.py makes such keys. The other keys, of KV and of values that programs put under keys of their own,
have no tenant.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

SPACE_BYTES = 6


class Spaces(NamedTuple):
    """The first bytes of one tenant's keys."""

    names: bytes
    parts: bytes


def spaces(tenant: str) -> Spaces:
    """Of heads, and of parts of values."""
    return Spaces(_space(tenant, b"mooncake-names"), _space(tenant, b"mooncake-parts"))


def _space(tenant: str, person: bytes) -> bytes:
    return blake2b(tenant.encode(), digest_size=SPACE_BYTES, person=person).digest()
