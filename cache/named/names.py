"""Names of any length in the pool: the keys of named values and the head that keeps the name with the value. Pure.

    key of a head      space of the tenant (6 bytes) | hash of the name (10 bytes)
    head               magic, bytes of the value, identity of its parts, length of the name | name | a value that fits
    key of a part      another space of the tenant | hash of identity and number of the part

A value that fits into one slot with its head is one block. A larger one is written in parts first, then its head: a
name that is found was written completely. Each writer chooses a new identity, so two writers never share a part. All
keys of a tenant begin with the same bytes, which is how they are listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from cache.block import KEY_BYTES, BlockKey
from cache.tenants import SPACE_BYTES, spaces

HEAD = Struct("<8sQ16sI4x")
MAGIC = b"mckname1"
WHOLE = bytes(16)
"""The identity of a value without parts."""

OUTSET_BYTES = 512
"""The first bytes of a block that show the head of almost every value."""


class NotAHead(ValueError):
    """A block holds something else, or a head of another version."""


@dataclass(frozen=True, slots=True)
class Space:
    """The keys of one tenant."""

    names: bytes
    parts: bytes

    @classmethod
    def of(cls, tenant: str) -> Space:
        return cls(*spaces(tenant))

    def key(self, name: str) -> BlockKey:
        digest = blake2b(name.encode(errors="surrogateescape"), digest_size=KEY_BYTES - SPACE_BYTES)
        return self.names + digest.digest()

    def part_keys(self, head: Head, part_bytes: int) -> list[BlockKey]:
        """The keys of a value's parts of `part_bytes` each; none if the value is whole."""
        if head.identity == WHOLE:
            return []
        start = blake2b(head.identity, digest_size=KEY_BYTES - SPACE_BYTES)
        keys = []
        for number in range(-(-head.nbytes // part_bytes)):
            one = start.copy()
            one.update(number.to_bytes(8, "little"))
            keys.append(self.parts + one.digest())
        return keys


@dataclass(frozen=True, slots=True)
class Head:
    """What the pool keeps of a value in addition to its bytes."""

    name: str
    nbytes: int
    identity: bytes = WHOLE

    def pack(self) -> bytes:
        name = self.name.encode(errors="surrogateescape")
        return HEAD.pack(MAGIC, self.nbytes, self.identity, len(name)) + name

    @staticmethod
    def unpack(block: bytes) -> tuple[Head, int]:
        """(head, its length), from at least the first bytes of a block. Raises NotAHead, also if `block` ends before
        the head does; its message then has the length."""
        if len(block) < HEAD.size or not block.startswith(MAGIC):
            raise NotAHead("this block is not a named value of this version")
        _, nbytes, identity, length = HEAD.unpack_from(block)
        end = HEAD.size + length
        if len(block) < end:
            raise NotAHead(f"the head has {end} bytes")
        return Head(block[HEAD.size : end].decode(errors="surrogateescape"), nbytes, identity), end
