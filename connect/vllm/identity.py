"""The root of the keys of an engine's blocks: everything that makes KV bytes interchangeable between two processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cache.block import KEY_BYTES, BlockKey

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
SAMPLES = 64
SAMPLE_BYTES = 4096


def root_of(facts: Mapping[str, Any]) -> BlockKey:
    """Of facts that JSON can write; their order does not matter."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=KEY_BYTES, person=b"mooncake-vllm").digest()


def fingerprint(model: str) -> str:
    """Of a model that is a folder or file of this machine: names and sizes of its weights, and samples of their bytes.
    '' for another model: its name and revision say which it is."""
    path = Path(model)
    if path.is_file():
        files: Iterable[Path] = [path]
    elif path.is_dir():
        files = sorted(file for pattern in WEIGHTS for file in path.glob(pattern))
    else:
        return ""
    digest = blake2b(digest_size=KEY_BYTES)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as stream:
            for number in range(SAMPLES):
                stream.seek(number * size // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
