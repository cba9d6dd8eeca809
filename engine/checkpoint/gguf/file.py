"""Header, metadata and tensor directory of a GGUF file, and its raw tensor bytes through a memory map.

The `gguf` package also reads these, but builds numpy arrays for each of about 100,000 vocabulary strings (2.3 s for the
embedded model; this reader: 0.1 s), and raises an internal index error for a truncated file. This module uses its
constants (types, block sizes) and its dequantisation.

Layout, all little-endian: magic, version u32, tensor count u64, metadata count u64; metadata (key, type u32, value);
tensor directory (name, dimension count u32, dimensions u64 innermost first, type u32, offset u64); padding; data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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


class GGUFFile:
    """An open GGUF file; a context manager. Raises ModelError unless the file is complete and of a known version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}") from None
        self._at = 0
        try:
            self._read_header()
            self._check_extents()
        except (struct.error, IndexError):
            self.close()
            raise ModelError(f"{path} ends inside its header: the file is truncated, fetch it again") from None
        except (ModelError, ValueError, RecursionError) as error:  # a bad enum value, bytes that are not UTF-8, nesting
            self.close()
            raise ModelError(f"{path} is not a usable GGUF file: {error}") from None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def raw(self, name: str) -> bytearray:
        """A writable copy of the tensor's bytes as stored."""
        tensor = self.tensors[name]
        with memoryview(self._map) as view:
            return bytearray(view[tensor.offset : tensor.offset + tensor.nbytes])

    def number(self, key: str, default: float | None = None) -> Any:
        """A number of the metadata. Raises ModelError if it is missing without a default, or not a number."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.path.name}: metadata {key} is {value!r}, not a number")
        return value

    def main_type(self) -> str:
        """Name of the type of most elements: "q4_1", or torch's name for a plain type."""
        elements: Counter[GGMLQuantizationType] = Counter()
        for tensor in self.tensors.values():
            elements[tensor.type] += math.prod(tensor.shape)
        name = elements.most_common(1)[0][0].name.lower() if elements else "f32"
        return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(name, name)

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise ModelError("it does not begin with 'GGUF'")
        self._at = 4
        if (version := self._scalar(_u32)) not in VERSIONS:
            raise ModelError(f"version {version} is not one of {VERSIONS}")
        num_tensors, num_metadata = self._scalar(_u64), self._scalar(_u64)
        for _ in range(num_metadata):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._scalar(_u32)))
        directory = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for tensor in directory:
            self.tensors[tensor.name] = GGUFTensor(
                tensor.name, tensor.type, tensor.shape, start + tensor.offset, tensor.nbytes
            )

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

    def _check_extents(self) -> None:
        size = len(self._map)
        needed = max((tensor.offset + tensor.nbytes for tensor in self.tensors.values()), default=0)
        if needed > size:
            raise ModelError(f"the file is truncated to {size} of {needed} bytes: fetch it again")

    def _scalar(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._map, self._at)
        self._at += kind.size
        return value

    def _string(self) -> str:
        start = self._at + _u64.size
        end = start + self._scalar(_u64)
        if end > len(self._map):
            raise IndexError
        self._at = end
        return self._map[start:end].decode()

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._string()
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(_scalars[kind])
        item, count = GGUFValueType(self._scalar(_u32)), self._scalar(_u64)
        if item is GGUFValueType.STRING or item is GGUFValueType.ARRAY:
            return [self._value(item) for _ in range(count)]
        array = struct.Struct(f"<{count}{_scalars[item].format[-1]}")
        values = list(array.unpack_from(self._map, self._at))
        self._at += array.size
        return values
