"""TensorCalls: upstream's calls for torch's tensors. docs/connect.md lists what differs.

A tensor is one value (cache/named/tensor_format.py). With `tp_size` above 1 it is cut into as many equal parts along
`split_dim`, and part r is the value NAME_tp_r; every rank may put all parts, `tp_rank` changes nothing there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from connect.common.raw_memory import Pieces
from connect.store import arguments, codes
from connect.store.client import answering, answers_code, answers_codes
from connect.store.replicate_config import ReplicateConfig
from connect.store.tensor_memory import tensor_at, tensor_in, value_of, values_of_shards

if TYPE_CHECKING:
    import torch

    Tensors = list[torch.Tensor | None]
    Put = Callable[[list[str], Sequence[Pieces | None], ReplicateConfig], list[int]]

PLAIN = ReplicateConfig()

answers_tensor = answering(lambda given, code: None)
answers_tensors = answering(lambda given, code: [None] * len(given[0]))


def shard_name(name: str, rank: int, size: int) -> str:
    """The name of the value with part `rank` of `size`."""
    return f"{name}_tp_{rank}" if size > 1 else name


class TensorCalls(ABC):
    """The tensor calls of a store that has these three."""

    @abstractmethod
    def _put(self, keys: list[str], values: Sequence[Pieces | None], config: ReplicateConfig) -> list[int]:
        """A code per key; INVALID for a value that is None."""

    @abstractmethod
    def _upsert(self, keys: list[str], values: Sequence[Pieces | None], config: ReplicateConfig) -> list[int]:
        """The same, but a value replaces another one."""

    @abstractmethod
    def _get_buffers(self, keys: list[str]) -> Sequence[bytearray | None]:
        """The values; None for missing ones."""

    @abstractmethod
    def _get_into(self, keys: list[str], into: Sequence[Pieces | None]) -> list[int]:
        """The bytes that went to each memory, or a code."""

    # --- put

    @answers_code
    def put_tensor(self, key: str, tensor: torch.Tensor) -> int:
        """0 also for a key that is there: its value stays. -600 for what is no tensor."""
        return self._put([arguments.text(key)], [value_of(tensor)], PLAIN)[0]

    @answers_codes
    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[torch.Tensor]) -> list[int]:
        return _whole(self._put, keys, tensors_list, PLAIN)

    @answers_code
    def pub_tensor(self, key: str, tensor: torch.Tensor, config: ReplicateConfig = PLAIN) -> int:
        return self._put([arguments.text(key)], [value_of(tensor)], config)[0]

    @answers_codes
    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[torch.Tensor], config: ReplicateConfig = PLAIN
    ) -> list[int]:
        return _whole(self._put, keys, tensors_list, config)

    @answers_code
    def put_tensor_with_tp(
        self, key: str, tensor: torch.Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """-600 also if the tensor has no such equal parts."""
        return self._put_split([arguments.text(key)], [tensor], PLAIN, tp_size, split_dim)[0]

    @answers_codes
    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[torch.Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self._put_split(arguments.texts(base_keys), tensors_list, PLAIN, tp_size, split_dim)

    @answers_code
    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: torch.Tensor,
        config: ReplicateConfig = PLAIN,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        return self._put_split([arguments.text(key)], [tensor], config, tp_size, split_dim)[0]

    @answers_codes
    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[torch.Tensor],
        config: ReplicateConfig = PLAIN,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self._put_split(arguments.texts(base_keys), tensors_list, config, tp_size, split_dim)

    def _put_split(
        self, keys: list[str], tensors: Sequence[Any], config: ReplicateConfig, tp_size: int, split_dim: int
    ) -> list[int]:
        """A code per tensor: that of its first part that was not stored."""
        size, dim = _integers(tp_size, split_dim)
        if size <= 1:
            return _whole(self._put, keys, tensors, config)
        if len(_listed(tensors)) != len(keys):
            return [codes.INVALID] * len(keys)
        parts = [values_of_shards(tensor, size, dim) for tensor in tensors]
        names = [[shard_name(key, rank, size) for rank in range(size)] for key in keys]
        good = [i for i, values in enumerate(parts) if values is not None]
        values = [value for i in good for value in parts[i] or ()]
        found = self._put([name for i in good for name in names[i]], values, config)
        ends = [codes.INVALID] * len(keys)
        for at, i in enumerate(good):
            ends[i] = next((end for end in found[at * size : (at + 1) * size] if end), codes.OK)
        return ends

    # --- put from memory of the caller: head and elements as get_tensor_into leaves them

    @answers_code
    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    @answers_codes
    def batch_put_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return _from_memory(self._put, keys, buffer_ptrs, sizes)

    @answers_code
    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    @answers_codes
    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        names = arguments.texts(base_keys)
        if len(buffer_ptrs) != len(names) or len(sizes) != len(names):
            return [codes.INVALID] * len(names)
        tensors = [tensor_at(*arguments.numbers(row, "buffer_ptrs")) for row in zip(buffer_ptrs, sizes, strict=True)]
        return self._put_split(names, tensors, PLAIN, tp_size, split_dim)

    # --- replace

    @answers_code
    def upsert_tensor(self, key: str, tensor: torch.Tensor) -> int:
        """Replace the value; for a moment the key is missing."""
        return self._upsert([arguments.text(key)], [value_of(tensor)], PLAIN)[0]

    @answers_codes
    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[torch.Tensor]) -> list[int]:
        return _whole(self._upsert, keys, tensors_list, PLAIN)

    @answers_code
    def upsert_pub_tensor(self, key: str, tensor: torch.Tensor, config: ReplicateConfig = PLAIN) -> int:
        return self._upsert([arguments.text(key)], [value_of(tensor)], config)[0]

    @answers_codes
    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[torch.Tensor], config: ReplicateConfig = PLAIN
    ) -> list[int]:
        return _whole(self._upsert, keys, tensors_list, config)

    @answers_code
    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    @answers_codes
    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        return _from_memory(self._upsert, keys, buffer_ptrs, sizes)

    # --- get

    @answers_tensor
    def get_tensor(self, key: str) -> torch.Tensor | None:
        """None if it is missing or no tensor."""
        return self._tensors([arguments.text(key)])[0]

    @answers_tensors
    def batch_get_tensor(self, keys: Sequence[str]) -> Tensors:
        return self._tensors(arguments.texts(keys))

    @answers_tensor
    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        """The part as it was put: `split_dim` changes nothing."""
        rank, size = _integers(tp_rank, tp_size)
        return self._tensors([shard_name(arguments.text(key), rank, size)])[0]

    @answers_tensors
    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> Tensors:
        rank, size = _integers(tp_rank, tp_size)
        return self._tensors([shard_name(key, rank, size) for key in arguments.texts(base_keys)])

    def _tensors(self, keys: list[str]) -> Tensors:
        return [None if value is None else tensor_in(value) for value in self._get_buffers(keys)]

    # --- get into memory of the caller, which must outlive the tensor

    @answers_tensor
    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> torch.Tensor | None:
        """The head and the elements go to `buffer_ptr`; the tensor lies there. None if they need more than `size`."""
        return self._tensors_into([arguments.text(key)], [buffer_ptr], [size])[0]

    @answers_tensors
    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> Tensors | list[int]:
        """-600 for every key if there are not as many addresses and sizes."""
        names = arguments.texts(keys)
        if len(buffer_ptrs) != len(names) or len(sizes) != len(names):
            return [codes.INVALID] * len(names)
        return self._tensors_into(names, buffer_ptrs, sizes)

    @answers_tensor
    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        rank, count = _integers(tp_rank, tp_size)
        return self._tensors_into([shard_name(arguments.text(key), rank, count)], [buffer_ptr], [size])[0]

    @answers_tensors
    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> Tensors | list[int]:
        rank, count = _integers(tp_rank, tp_size)
        names = [shard_name(key, rank, count) for key in arguments.texts(base_keys)]
        return self.batch_get_tensor_into(names, buffer_ptrs, sizes)

    def _tensors_into(self, keys: list[str], addresses: Sequence[int], sizes: Sequence[int]) -> Tensors:
        rooms = [arguments.pieces([at], [size]) for at, size in zip(addresses, sizes, strict=True)]
        ends = self._get_into(keys, rooms)
        return [tensor_at(at, end) if end > 0 else None for at, end in zip(addresses, ends, strict=True)]


def _whole(put: Put, keys: Sequence[str], tensors: Sequence[Any], config: ReplicateConfig) -> list[int]:
    names = arguments.texts(keys)
    if len(_listed(tensors)) != len(names):
        return [codes.INVALID] * len(names)
    return put(names, [value_of(tensor) for tensor in tensors], config)


def _from_memory(put: Put, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """INVALID for memory that does not hold a tensor of exactly that size."""
    names = arguments.texts(keys)
    if len(addresses) != len(names) or len(sizes) != len(names):
        return [codes.INVALID] * len(names)
    rows = [arguments.numbers(row, "buffer_ptrs and sizes") for row in zip(addresses, sizes, strict=True)]
    values = [None if tensor_at(*row) is None else Pieces([(row[0], row[1])]) for row in rows]
    return put(names, values, PLAIN)


def _listed(tensors: Any) -> Sequence[Any]:
    """Raises TypeError for a tensor in place of a list."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"tensors_list must be a list, not {type(tensors).__name__}")
    return tensors


def _integers(*values: Any) -> list[int]:
    """Raises TypeError."""
    if any(not isinstance(value, int) for value in values):
        raise TypeError("tp_rank, tp_size and split_dim must be int")
    return list(values)
