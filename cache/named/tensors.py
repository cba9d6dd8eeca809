"""NamedTensors: finds and reads the tensors that programs put into the pool under names (`put_tensor` and its kin).

It first reads only the heads, so that a caller learns which tensors are missing or have another shape before it moves
any elements. What it reads later belongs to that head: elements of a tensor that was replaced in between are missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import memmove, string_at
from dataclasses import dataclass

from cache.named.names import OUTSET_BYTES, WHOLE, Head, NotAHead, Space
from cache.named.tensor_format import HEAD_BYTES, NotATensor, TensorHead
from cache.store.store import Store


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in the pool. `packed`: the first HEAD_BYTES of its value."""

    head: TensorHead
    value: Head
    packed: bytes


class NamedTensors:
    """Of one tenant. Use it on the event loop of `store`."""

    def __init__(self, store: Store, tenant: str) -> None:
        self._store = store
        self._space = Space.of(tenant)

    async def find(self, names: Sequence[str]) -> dict[str, FoundTensor | None]:
        """Those of `names` that have a value; None for a value that is no tensor. The heads of names of up to about 160
        bytes are read in two calls per home."""
        begins: dict[str, tuple[Head, bytes]] = {}
        parts: dict[bytes, tuple[str, Head]] = {}
        keys = {self._space.key(name): name for name in names}
        for key, outset in (await self._store.outsets(list(keys), OUTSET_BYTES)).items():
            name = keys[key]
            try:
                value, length = Head.unpack(outset)
            except NotAHead:
                continue  # a block of another kind under the same 16 bytes, or a name longer than any of ours
            if value.name != name:
                continue
            if value.identity == WHOLE:
                begins[name] = value, outset[length : length + HEAD_BYTES]
            else:
                parts[self._space.part_keys(value, self._store.block_bytes)[0]] = name, value
        for key, begin in (await self._store.outsets(list(parts), HEAD_BYTES)).items():
            name, value = parts[key]
            begins[name] = value, begin
        return {name: _found(value, begin) for name, (value, begin) in begins.items()}

    async def read(self, tensor: FoundTensor, into: memoryview) -> bool:
        """Copy the elements to `into`, which has `tensor.head.nbytes`. False if the tensor, or a part of it, is no
        longer there; the memory is undefined then."""
        value, size = tensor.value, self._store.block_bytes
        start = ctypes.addressof(ctypes.c_char.from_buffer(into))
        arrived = 0

        def take_part(i: int, address: int, nbytes: int) -> None:
            nonlocal arrived
            skipped = HEAD_BYTES - i * size  # what is left of the head where this part begins
            if nbytes > skipped:
                memmove(start + max(0, -skipped), address + max(0, skipped), nbytes - max(0, skipped))
            arrived += nbytes

        def take_whole(i: int, address: int, nbytes: int) -> None:
            nonlocal arrived
            head = value.pack() + tensor.packed
            if nbytes == len(head) + len(into) and string_at(address, len(head)) == head:
                memmove(start, address + len(head), len(into))
                arrived = value.nbytes

        if value.identity == WHOLE:
            await self._store.scattered.get_each([self._space.key(value.name)], take_whole)
        else:
            await self._store.scattered.get_each(self._space.part_keys(value, size), take_part)
        return arrived == value.nbytes


def _found(value: Head, begin: bytes) -> FoundTensor | None:
    try:
        return FoundTensor(TensorHead.unpack(begin, value.nbytes), value, begin[:HEAD_BYTES])
    except NotATensor:
        return None
