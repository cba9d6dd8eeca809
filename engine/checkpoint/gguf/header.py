"""Header of a GGUF file: its metadata and its tensor directory.

The `gguf` package also reads these, but builds numpy arrays for each of about 100,000 vocabulary strings (2.3 s for the
embedded model; this reader: 0.05 s), and raises an internal index error for a truncated file. This module uses its
constants (types, block sizes).

Layout, all little-endian: magic, version u32, tensor count u64, metadata count u64; metadata (key, type u32, value);
tensor directory (name, dimension count u32, dimensions u64 innermost first, type u32, offset u64); padding; data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.model.model_error import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_scalars = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_u32, _u64 = _scalars[GGUFValueType.UINT32], _scalars[GGUFValueType.UINT64]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the directory. `shape`: outermost dimension first, like torch; `offset`: from the file's start."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata and the directory of one file. Several readers share it: nobody changes it."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


_last: list[tuple[bytes, Header]] = []
"""The header that was read last, and its bytes. A start of a node opens its file four times."""


def header_of(file: mmap.mmap) -> Header:
    """Raises struct.error or IndexError if the file ends inside its header; ModelError, ValueError or RecursionError
    if it cannot be used."""
    for known, header in _last:
        if file[: len(known)] == known:
            return header
    reader = _Reader(file)
    header = reader.header()
    _last[:] = [(file[: reader.end], header)]
    return header


def forget_header() -> None:
    """Give its strings back: they take several times as much memory as in the file."""
    _last.clear()


class _Reader:
    """Reads one file from its begin. `end`: where the next value begins, in bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.end = 0

    def header(self) -> Header:
        metadata: dict[str, Any] = {}
        if self._data[:4] != MAGIC:
            raise ModelError("it does not begin with 'GGUF'")
        self.end = 4
        if (version := self._scalar(_u32)) not in VERSIONS:
            raise ModelError(f"version {version} is not one of {VERSIONS}")
        num_tensors, num_metadata = self._scalar(_u64), self._scalar(_u64)
        for _ in range(num_metadata):
            key = self._string()
            metadata[key] = self._value(GGUFValueType(self._scalar(_u32)))
        directory = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"general.alignment is {alignment!r}")
        start = -(-self.end // alignment) * alignment
        return Header(metadata, {one.name: replace(one, offset=start + one.offset) for one in directory})

    def _tensor(self) -> GGUFTensor:
        name = self._string()
        shape = tuple(self._scalar(_u64) for _ in range(self._scalar(_u32)))[::-1]
        code, offset = self._scalar(_u32), self._scalar(_u64)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ModelError(f"tensor {name} has unknown type {code}; `pip install -U gguf` may know it") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_elements:
            raise ModelError(f"tensor {name} {list(shape)} does not divide into {kind.name} blocks of {block_elements}")
        return GGUFTensor(name, kind, shape, offset, math.prod(shape) // block_elements * block_bytes)

    def _scalar(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._data, self.end)
        self.end += kind.size
        return value

    def _string(self) -> str:
        start = self.end + _u64.size
        end = start + self._scalar(_u64)
        if end > len(self._data):
            raise IndexError
        self.end = end
        return self._data[start:end].decode()

    def _strings(self, count: int) -> list[str]:
        """As `_string`, in half the time: a vocabulary and its merges are most of a header."""
        data, size, unpack, end, strings = self._data, len(self._data), _u64.unpack_from, self.end, list[str]()
        for _ in range(count):
            start = end + _u64.size
            end = start + unpack(data, end)[0]
            if end > size:
                raise IndexError
            strings.append(data[start:end].decode())
        self.end = end
        return strings

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(_scalars[kind])
        item, count = GGUFValueType(self._scalar(_u32)), self._scalar(_u64)
        if item is GGUFValueType.STRING:
            return self._strings(count)
        if item is GGUFValueType.ARRAY:
            return [self._value(item) for _ in range(count)]
        array = struct.Struct(f"<{count}{_scalars[item].format[-1]}")
        values = list(array.unpack_from(self._data, self.end))
        self.end += array.size
        return values
