"""LMCache's chunks in the pool: their names, and what stands before their bytes. Pure.

    inside an engine     lmcache/[TAG/]GEOMETRY/KEY       KEY is LMCache's own text of a CacheEngineKey
    LMCache's server     lmcache-mp/[TAG/]MODEL/RANK/GROUP/[SALT/]HASH

LMCache's keys name the model, the rank and a hash of all tokens up to the end of the chunk, but not the shape of its
KV. Inside an engine the name has it. LMCache's server does not know it at every call: there it stands before the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

LAYOUT_BYTES = 16


def engine_root(config: Any, metadata: Any, tag: str = "") -> str:
    """From LMCache's configuration and its metadata of the engine; the same in an engine's scheduler and workers.
    `tag`: what the user adds, such as a version of the weights."""
    shape = "x".join(str(size) for size in metadata.kv_shape)
    form = "mla" if metadata.use_mla else "mha"
    geometry = f"{form}{shape}-{_plain(metadata.kv_dtype)}-chunk{metadata.chunk_size}-{config.remote_serde}"
    return "/".join(["lmcache", *([tag] if tag else []), geometry])


def server_name(key: Any, tag: str = "") -> str:
    """Of an ObjectKey."""
    salt = [f"salt={key.cache_salt}"] if key.cache_salt else []
    rank, group = f"rank{key.kv_rank:08x}", f"group{key.object_group_id}"
    parts = ["lmcache-mp", *([tag] if tag else []), key.model_name, rank, group, *salt, key.chunk_hash.hex()]
    return "/".join(parts)


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> bytes:
    """LAYOUT_BYTES that two layouts do not share."""
    text = ";".join(f"{tuple(shape)} {_plain(dtype)}" for shape, dtype in zip(shapes, dtypes, strict=True))
    return blake2b(text.encode(), digest_size=LAYOUT_BYTES).digest()


def leading(done: Sequence[bool]) -> int:
    """Length of the leading run that is done."""
    return list(done).index(False) if False in done else len(done)


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
