"""A GGUF file: its header (header.py), and the raw bytes of its tensors through a memory map."""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from gguf.constants import GGMLQuantizationType

from engine.checkpoint.gguf.header import header_of
from engine.model.model_error import ModelError


class GGUFFile:
    """An open GGUF file; a context manager. Raises ModelError unless the file is complete and of a known version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}") from None
        try:
            header = header_of(self._map)
            self.metadata, self.tensors = header.metadata, header.tensors
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

    def _check_extents(self) -> None:
        size = len(self._map)
        needed = max((tensor.offset + tensor.nbytes for tensor in self.tensors.values()), default=0)
        if needed > size:
            raise ModelError(f"the file is truncated to {size} of {needed} bytes: fetch it again")
