"""WeightCache: stores weights converted from a GGUF file, so that the next start only reads them.

An entry is a safetensors file. Its name is the hash of everything that determines its content: every byte of the source
file, the type, and the version of the conversion. A replaced source file therefore has another entry, and dates do not
matter. Several threads read the data into memory once and compare it with the checksums in the header: a damaged or
truncated entry is a miss and is deleted.

Each writer writes its own file and renames it, so nodes that start concurrently never read unfinished files. If the
cache is full, the least recently used entry is deleted first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

log = logging.getLogger("mooncake.engine")

CONVERSION = 1
"""Increase it whenever the same file would give other tensors: names, order of rows, stacking, rounding."""

PIECE_BYTES = 8 << 20
MAX_BYTES = 16 << 30
"""Of all entries together."""
STALE_S = 3600.0
"""An unfinished file older than this is from a process that died."""

DTYPES = (("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16))


@dataclass(frozen=True, slots=True)
class WeightCache:
    """A directory of entries, shared by all processes of this user."""

    folder: Path
    max_bytes: int = MAX_BYTES

    def entry(self, source: Path, dtype: torch.dtype) -> Path:
        """The path for the converted weights of `source`. Reads the whole source: 20 ms for 98 MB in the page cache."""
        hasher = xxh3_128(f"{CONVERSION}|gguf {version('gguf')}|{dtype}|".encode())
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start in range(0, len(data), PIECE_BYTES):
                hasher.update(data[start : start + PIECE_BYTES])
        return self.folder / f"{hasher.hexdigest()}.safetensors"

    def load(self, entry: Path) -> dict[str, Tensor] | None:
        """The tensors of an entry, in their own memory; None if there is no complete entry."""
        try:
            with entry.open("rb") as file:
                tensors = _read(file.fileno(), entry.stem)
            os.utime(entry)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the converted weights in %s are damaged (%s); converting them again", entry, error)
            with contextlib.suppress(OSError):
                entry.unlink()
            return None
        return tensors

    def save(self, entry: Path, weights: Mapping[str, Tensor]) -> None:
        """Write an entry and make room for it. Errors are only logged, because the weights are already in memory."""
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        if nbytes > self.max_bytes:
            log.info("%d MB of converted weights exceed the cache of %d MB", nbytes >> 20, self.max_bytes >> 20)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(nbytes, keep=entry.name)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix="writing-", delete=False) as file:
                unfinished = Path(file.name)
                try:
                    _write(file.fileno(), entry.stem, weights)
                    unfinished.replace(entry)
                except BaseException:
                    unfinished.unlink(missing_ok=True)
                    raise
        except OSError as error:
            log.warning("could not keep converted weights in %s: %s", self.folder, error)

    def _make_room(self, nbytes: int, keep: str) -> None:
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                stat = path.stat()
                if path.name.startswith("writing-") and time.time() - stat.st_mtime > STALE_S:
                    path.unlink()
                elif path.suffix == ".safetensors" and path.name != keep:
                    entries.append((stat.st_mtime, stat.st_size, path))
        used = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if used + nbytes <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            used -= size


# --- the file: u64 length of the header, header (JSON), data. There is a checksum of each tensor and of the table.


def _write(file: int, key: str, weights: Mapping[str, Tensor]) -> None:
    table, at = {}, 0
    for name, tensor in weights.items():
        code = next(code for code, dtype in DTYPES if dtype == tensor.dtype)
        table[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        sums = list(threads.map(lambda tensor: xxh3_128_hexdigest(_bytes_of(tensor)), weights.values()))
    metadata = {"key": key, "table": _sum_of(table), "sums": ",".join(sums)}
    header = json.dumps({"__metadata__": metadata} | table).encode()
    header += b" " * (-len(header) % 8)
    parts = [memoryview(len(header).to_bytes(8, "little") + header), *map(_bytes_of, weights.values())]
    for view in parts:
        while view:
            view = view[os.write(file, view) :]


def _read(file: int, key: str) -> dict[str, Tensor]:
    """Raises ValueError, KeyError, TypeError or OSError for an incomplete file."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < length <= os.fstat(file).st_size - 8:
        raise ValueError("no header")
    table: dict[str, Any] = json.loads(os.pread(file, length, 8))
    metadata = table.pop("__metadata__")
    if metadata["key"] != key or metadata["table"] != _sum_of(table):
        raise ValueError("the header belongs to another file")
    dtypes, sums = dict(DTYPES), metadata["sums"].split(",")
    if len(sums) != len(table):
        raise ValueError("sums are missing")

    def read(entry: dict[str, Any], sum_: str) -> Tensor:
        begin, end = entry["data_offsets"]
        tensor = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
        view = _bytes_of(tensor)
        at = 0
        while at < len(view) and (got := os.preadv(file, [view[at:]], 8 + length + begin + at)):
            at += got
        if at != end - begin or xxh3_128_hexdigest(view) != sum_:
            raise ValueError("its sums do not match")
        return tensor

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        tensors = list(threads.map(read, table.values(), sums))
    return dict(zip(table, tensors, strict=True))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory; a copy only if the tensor is not contiguous or not on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _sum_of(table: Mapping[str, Any]) -> str:
    return str(xxh3_128_hexdigest(json.dumps(table, sort_keys=True).encode()))
