"""TokenBytes: the bytes of each token.

The two kinds of BPE vocabularies in the Llama family write bytes as text in two ways: byte-level ones as one letter per
byte (GPT-2), SentencePiece-like ones as plain text with U+2581 for a space and <0xE2> for a single byte. With bytes,
incremental decoding is concatenation, and a UTF-8 decoder cuts the text between characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

from engine.model.model_error import ModelError

SPACE = "\u2581"
LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def letters() -> dict[str, int]:
    """GPT-2's letter -> byte: printable Latin-1 represents itself, U+0100 and later letters the other 68 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(other)}


BYTE_OF = letters()


class TokenBytes:
    """`token_bytes[id]`, computed once per id; empty for an id without a token. Raises ModelError for other kinds of
    tokenizers."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        steps = list(_steps(json.loads(core.decoder.__getstate__()) if core.decoder is not None else None))
        kinds = {step["type"] for step in steps}
        self._core = core
        self._known: dict[int, bytes] = {}
        self._convert: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            self._convert = byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._convert = sentencepiece
        else:
            raise ModelError(f"tokenizer.json has the decoder {sorted(kinds)}; only byte-level and SentencePiece work")
        self.strips_first_space = any(_strips(step) for step in steps)
        self.special_ids = frozenset(
            token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special
        )

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._core.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""
            known = self._known[token_id] = self._convert(token)
        return known


def byte_level(token: str) -> bytes:
    """The bytes of a token; a token with a letter outside the alphabet is an added one, written as plain text."""
    try:
        return bytes(BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    if lone := LONE_BYTE.fullmatch(token):
        return bytes.fromhex(lone[1])
    return token.replace(SPACE, " ").encode()


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The decoder's parts; a Sequence may nest."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _strips(step: dict[str, Any]) -> bool:
    """Whether this step removes the space that the encoder added before the first word."""
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("content") == " " and step.get("start"))
