"""Reads many blocks through the index of another process in one C call: finds, copies and compares them (block_read.c).

One pass over the bytes does what cache/store/same_host.py does in two, so a checked copy takes no longer than a plain
one. Machines without a C compiler or without AVX2, and values of at most 240 bytes, use those two passes.
"""

from __future__ import annotations

import asyncio
import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event

from cache.block import BlockKey
from cache.copy_threads import CopyThreads
from cache.index.shared_index import IndexView
from net import compiled
from net.compiled import NotCompiled
from net.transfer.common.memory import Region

SOURCE = Path(__file__).with_name("block_read.c")
TURN_BYTES = 1 << 20  # copied on the event loop between two turns, about 0.15 ms
ON_LOOP_BYTES = 2 << 20  # copied in turns on the loop; more goes to a thread, which costs 0.1 to 0.2 ms


class BlockRead:
    """The C code. The constructor may compile it, which takes half a second. Raises NotCompiled."""

    def __init__(self) -> None:
        library = compiled.library(SOURCE)
        if not library.usable():
            raise NotCompiled("this machine has no AVX2")
        word, pointer = ctypes.c_uint64, ctypes.c_void_p
        self._read = library.read_blocks
        self._read.restype = None
        self._read.argtypes = [
            *(pointer, word, pointer, word, word, ctypes.c_char_p, ctypes.c_size_t, pointer, pointer)
        ]

    def get_now(self, index: IndexView, arena: Region, keys: Sequence[BlockKey], targets: Sequence[int]) -> list[int]:
        """The same as `get`, in the calling thread; any thread may call."""
        lengths = array("I", bytes(4 * len(keys)))
        self._read_some(index, arena, keys, array("Q", targets), lengths, 0, len(keys))
        return list(lengths)

    async def get(
        self, threads: CopyThreads, index: IndexView, arena: Region, keys: Sequence[BlockKey], targets: Sequence[int]
    ) -> list[int]:
        """Copies blocks to `targets`, addresses with room for a slot. Returns the bytes of each copied block, 0 for the
        others. Both regions must stay mapped until this returns or raises; it writes nothing after that."""
        lengths = array("I", bytes(4 * len(keys)))
        addresses = array("Q", targets)
        read = partial(self._read_some, index, arena, keys, addresses, lengths)
        step = max(1, TURN_BYTES // index.slot_bytes)
        if len(keys) * index.slot_bytes <= ON_LOOP_BYTES:
            for first in range(0, len(keys), step):
                if first:
                    await asyncio.sleep(0)
                read(first, step)
        else:
            share = -(-len(keys) // threads.count)
            parts = [range(first, min(len(keys), first + share)) for first in range(0, len(keys), share)]
            await threads.run([partial(_in_steps, read, part, step) for part in parts])
        return list(lengths)

    def _read_some(
        self,
        index: IndexView,
        arena: Region,
        keys: Sequence[BlockKey],
        targets: array[int],
        lengths: array[int],
        first: int,
        count: int,
    ) -> None:
        some = keys[first : first + count]
        at, found = targets.buffer_info()[0], lengths.buffer_info()[0]
        self._read(
            index.address,
            index.buckets,
            arena.address,
            arena.nbytes,
            index.slot_bytes,
            b"".join(some),
            len(some),
            at + first * targets.itemsize,
            found + first * lengths.itemsize,
        )


def _in_steps(read: Callable[[int, int], None], part: range, step: int, stop: Event) -> None:
    for first in part[::step]:
        if stop.is_set():
            break
        read(first, min(step, part.stop - first))
