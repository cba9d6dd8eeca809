"""The keys of a prompt's blocks in one call: keys.c, compiled on first use into the user's cache.

A machine without a C compiler uses hashlib, which makes the same keys one by one, four times slower for blocks of 16
tokens. Both are BLAKE2b, and the tests compare them.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from net import compiled
from net.compiled import NotCompiled

__all__ = ["NotCompiled", "chain", "prepare"]

SOURCE = Path(__file__).with_name("keys.c")
KEY_BYTES = 16

LONG_PROMPT = 16_384
"""Tokens: 150 us. Other threads run while the keys of a longer prompt are computed."""

_library: tuple[ctypes.CDLL, ctypes.CDLL] | None = None  # for long prompts, and for others: net.compiled.held


def prepare() -> None:
    """Use the C code from now on; compiles it if necessary, which takes half a second. Raises NotCompiled."""
    global _library
    library = compiled.library(SOURCE)
    held = compiled.held(library)
    for one in (library, held):
        one.key_chain.restype = None
        one.key_chain.argtypes = [
            *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
        ]
    if not library.key_chain_order():
        raise NotCompiled("this machine is not little-endian")
    _library = library, held


def chain(parent: bytes, tokens: array[int], block_size: int) -> Sequence[bytes]:
    """Keys of the full blocks of `tokens` (uint32) that follow the block named `parent`."""
    count = len(tokens) // block_size
    if _library is None:
        return _by_hashlib(parent, tokens.tobytes(), 4 * block_size, count)
    out = array("B", bytes(KEY_BYTES * count))  # ctypes would make a type for each length
    _library[len(tokens) <= LONG_PROMPT].key_chain(
        parent, tokens.buffer_info()[0], block_size, count, out.buffer_info()[0]
    )
    return _splitter(count).unpack_from(out)


def _by_hashlib(parent: bytes, content: bytes, block_bytes: int, count: int) -> list[bytes]:
    keys = []
    for start in range(0, count * block_bytes, block_bytes):
        parent = blake2b(parent + content[start : start + block_bytes], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


@lru_cache(maxsize=64)
def _splitter(count: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * count)
