"""GET /cluster between nodes with a cluster key: the question proves the key, and the answer is sealed with it. Pure.

    Authorization: Mooncake <key id>.<nonce>.<proof>      hex; the proof is derived from the key and the nonce
    200, application/octet-stream                         iv 12 | AES-256-GCM of the JSON | tag 16

The sealing key is derived from the cluster key and the asking node's nonce, so an answer fits one question only and
cannot be replayed. An eavesdropper learns neither key nor answer; if it repeats the question, it cannot open the
answer.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from net.channel.keyring import Key, Keyring

SCHEME = "Mooncake"
SEALED_TYPE = "application/octet-stream"
NONCE_BYTES = 16
IV_BYTES = 12
PROOF_BYTES = 32


class NotOurs(Exception):
    """The answering node does not have the key."""


@dataclass(frozen=True, slots=True)
class Question:
    """`nonce`: NONCE_BYTES random bytes for this question."""

    key: Key
    nonce: bytes

    def header(self) -> str:
        """The value of Authorization."""
        return f"{SCHEME} {self.key.id.hex()}.{self.nonce.hex()}.{self._proof().hex()}"

    def seal(self, answer: bytes, iv: bytes) -> bytes:
        """`iv`: IV_BYTES random bytes, because the same question may get two different answers."""
        return iv + self._cipher().encrypt(iv, answer, None)

    def open(self, sealed: bytes) -> bytes:
        """Raises NotOurs."""
        try:
            return self._cipher().decrypt(sealed[:IV_BYTES], sealed[IV_BYTES:], None)
        except (InvalidTag, ValueError):
            raise NotOurs from None

    def _proof(self) -> bytes:
        return self.key.derive(b"join question", self.nonce, PROOF_BYTES)

    def _cipher(self) -> AESGCM:
        return AESGCM(self.key.derive(b"join answer", self.nonce, 32))


def asked(ring: Keyring | None, header: str) -> Question | None:
    """The question in an Authorization header; None for other headers and for questions that prove none of our keys."""
    scheme, _, rest = header.partition(" ")
    if ring is None or scheme != SCHEME:
        return None
    try:
        key_id, nonce, proof = (bytes.fromhex(part) for part in rest.split("."))
    except ValueError:
        return None
    key = ring.find(key_id)
    if key is None or len(nonce) != NONCE_BYTES:
        return None
    question = Question(key, nonce)
    return question if hmac.compare_digest(proof, question._proof()) else None
