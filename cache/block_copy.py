"""Copies blocks and computes their checksums in one C call and in one pass over the bytes.

The code is part of cache/index/block_read.c. Machines without a C compiler or without AVX2 use two passes
(cache/checked_copy.py).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

from net import compiled
from net.compiled import NotCompiled

SOURCE = Path(__file__).with_name("index") / "block_read.c"
SHORT_BYTES = 240  # the C code hashes only longer blocks


class BlockCopy:
    """The C code. The constructor may compile it, which takes half a second. Raises NotCompiled."""

    def __init__(self) -> None:
        library = compiled.library(SOURCE)
        if not library.usable():
            raise NotCompiled("this machine has no AVX2")
        pointer = ctypes.c_void_p
        self._copy = library.copy_blocks
        self._copy.restype = None
        self._copy.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer]

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Copies block i from the address sources[i] to targets[i]; returns the checksums, 0 for blocks of at most
        SHORT_BYTES. Releases the interpreter lock."""
        froms, tos, sizes = array("Q", sources), array("Q", targets), array("Q", lengths)
        sums = array("Q", bytes(sizes.itemsize * len(sizes)))
        where = [column.buffer_info()[0] for column in (froms, tos, sizes, sums)]
        self._copy(*where[:3], len(sizes), where[3])
        return list(sums)
