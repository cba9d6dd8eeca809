"""The cluster key: secrets shared by all nodes. The first one is used to send; all are tried on receipt. Pure.

No secret is used directly: every use derives its own key from it (HKDF-SHA256, RFC 5869), so the key of one connection
reveals nothing about another key or the secret. The file contains one secret per line; the first is the primary:

    # openssl rand -hex 32
    3f6c...   64 hex digits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES = 32
ID_BYTES = 4
KEYS_MAX = 8  # in one file; a handshake lists the ids of all


@dataclass(frozen=True)
class Key:
    """One secret of 32 bytes. It does not show itself in a repr or a log line."""

    secret: bytes

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"

    @cached_property
    def id(self) -> bytes:
        """Identifies the key to peers without revealing it."""
        return self.derive(b"id", b"", ID_BYTES)

    def derive(self, use: bytes, salt: bytes, nbytes: int, more: bytes = b"") -> bytes:
        """A key for one `use`; another salt gives another key. `more` is additional secret input."""
        hkdf = HKDF(SHA256(), nbytes, salt or None, b"mooncake 1 " + use)
        return hkdf.derive(self.secret + more)


@dataclass(frozen=True, slots=True)
class Keyring:
    """All keys of a node, the primary first."""

    keys: tuple[Key, ...]

    @property
    def primary(self) -> Key:
        return self.keys[0]

    def find(self, key_id: bytes) -> Key | None:
        return next((key for key in self.keys if key.id == key_id), None)

    def common(self, key_ids: Sequence[bytes]) -> tuple[int, Key] | None:
        """The first of a peer's keys that is also in this keyring, and its index."""
        for index, key_id in enumerate(key_ids):
            if (key := self.find(key_id)) is not None:
                return index, key
        return None


def parse(text: str) -> Keyring:
    """The keyring of a file. Raises ValueError naming the line, never its content."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            secret = bytes.fromhex(word)
        except ValueError:
            secret = b""
        if len(secret) != SECRET_BYTES:
            raise ValueError(
                f"line {number} is not {2 * SECRET_BYTES} hex digits; make one with `openssl rand -hex 32`"
            )
        if (key := Key(secret)) in keys:
            raise ValueError(f"line {number} repeats an earlier key")
        keys.append(key)
    if not 1 <= len(keys) <= KEYS_MAX:
        raise ValueError(f"it has {len(keys)} keys; write 1 to {KEYS_MAX} keys, one per line")
    return Keyring(tuple(keys))
