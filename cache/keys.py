"""The keys of blocks: a 128-bit chained hash, root -> parent key -> token ids.

Two nodes with equal roots agree on every key; the root covers everything that makes KV bytes interchangeable. keys.c
makes the keys of a prompt in one call; it is compiled on first use into the user's cache. A machine without a C
compiler uses hashlib, which makes the same keys one by one, four times slower for blocks of 16 tokens. Both are
BLAKE2b, and the tests compare them.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from cache.block import KEY_BYTES, BlockGeometry, BlockKey
from net import compiled
from net.compiled import NotCompiled

SOURCE = Path(__file__).with_name("keys.c")

LONG_PROMPT = 16_384
"""Tokens: 150 us. Other threads run while the keys of a longer prompt are computed."""

_library: tuple[ctypes.CDLL, ctypes.CDLL] | None = None  # for long prompts, and for others: net.compiled.held


LAYOUT = "layer,kv,head,token,dim/1"
"""Names the order of axes inside a block and its version; part of the root."""


def root_key(model_fingerprint: str, geometry: BlockGeometry) -> BlockKey:
    """The root of all keys of a cluster; nodes with another root cannot join."""
    g = geometry
    text = f"{model_fingerprint}|{g.num_layers}x{g.num_kv_heads}x{g.head_size}|{g.block_size}|{g.dtype}|{LAYOUT}"
    if g.groups is not None:
        text += f"|groups {g.groups.windows} {g.groups.places}"
        if g.groups.state_bytes:
            text += f"|states {g.groups.state_bytes}"
        if g.groups.pools_ends:
            text += "|windows at ends"
    if g.kind != "full":
        text += f"|{g.kind}"
    if g.encoded:
        text += f"|{g.pool_dtype}"
    if g.wire_encoded:
        text += f"|wire {g.wire_dtype}"
    return blake2b(text.encode(), digest_size=KEY_BYTES, person=b"mooncake-root").digest()


def salted_root(root: BlockKey, salt: str) -> BlockKey:
    """Root of one tenant's keys: equal prompts under different salts share no block."""
    if not salt:
        return root
    return blake2b(root + salt.encode(), digest_size=KEY_BYTES, person=b"mooncake-salt").digest()


class WideKey(bytes):
    """The key of a block in a node whose blocks have the tokens of several blocks of the pool: the key of the last of
    these. `parts`: the keys of all of them, in order."""

    parts: tuple[BlockKey, ...]


def extend_wide(wide: list[BlockKey], keys: Sequence[BlockKey], each: int) -> list[BlockKey]:
    """Append to `wide` the keys, WideKey, of blocks that have `each` blocks of the pool, whose keys are `keys`; returns
    `wide`."""
    for end in range((len(wide) + 1) * each, len(keys) + 1, each):
        key = WideKey(keys[end - 1])
        key.parts = tuple(keys[end - each : end])
        wide.append(key)
    return wide


def pooled_keys(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """The keys, in the pool, of a node's blocks."""
    return [part for key in keys for part in (key.parts if isinstance(key, WideKey) else (key,))]


def weights_root(root: BlockKey, weights: bytes) -> BlockKey:
    """Root of the keys of a request that is computed with replaced weights (engine/update/): `weights` identifies their
    content; b"" = those with which the cluster began. `root` may be salted."""
    if not weights:
        return root
    return blake2b(root + weights, digest_size=KEY_BYTES, person=b"mooncake-weights").digest()


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


def extend_keys(root: BlockKey, keys: list[BlockKey], token_ids: Sequence[int], block_size: int) -> list[BlockKey]:
    """Append to `keys` the keys of all full blocks of `token_ids` not yet in it; returns `keys`."""
    start = len(keys) * block_size
    if len(token_ids) >= start + block_size:
        new = token_ids[start:] if start else token_ids  # a new prompt is not copied
        keys += chain(keys[-1] if keys else root, array("I", new), block_size)
    return keys


def keys_in_parts(root: BlockKey, token_ids: Sequence[int], block_size: int, most: int) -> Iterator[list[BlockKey]]:
    """The keys of all full blocks of `token_ids`, at most `most` at a time; each part is made when it is wanted."""
    end = len(token_ids) // block_size * block_size
    for start in range(0, end, most * block_size):
        keys = extend_keys(root, [], token_ids[start : min(end, start + most * block_size)], block_size)
        root = keys[-1]
        yield keys
