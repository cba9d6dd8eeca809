"""The bytes of a tensor in the pool, as upstream writes them: a head of HEAD_BYTES, then the elements in C order. Pure.

Offsets in the head, little-endian:
      0  magic, version, bytes of the head (uint32, uint16, uint16)
      8  number of the dtype, number of dimensions, kind: 0 whole, 1 a shard (int32 each), 4 bytes of 0
     24  offset of the elements, their bytes (uint64 each)
     40  shape of the whole tensor, shape of these elements (8 x int64 each, -1 where there is no dimension)
    168  number of axes (int32), 4 bytes of 0, 4 axes of 32 bytes: kind (1: tensor parallelism), index of the axis,
         rank, number of ranks, split dimension, 0 (int32 each), extent of the shard in that dimension (int64)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from struct import Struct

DTYPES = {
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""torch's names, in the order of their numbers, with the bytes of one element."""

DIMS_MAX = 8
FIXED = Struct("<IHHiii4xQQ")
SHAPES = Struct("<8q8q")
AXIS = Struct("<i4xiiiii4xq")  # the number of axes and the first of them
HEAD_BYTES = 304
MAGIC, VERSION = 0x4D4F4F4E, 1
WHOLE, SHARD = 0, 1
TP = 1
NAMES = list(DTYPES)


class NotATensor(ValueError):
    """These bytes, this dtype or this shape are no tensor of this format."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a tensor: `rank` of `count` equal parts along dimension `dim` of a tensor of `shape`."""

    rank: int
    count: int
    dim: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorHead:
    """`dtype` is torch's name, `shape` that of the elements that follow."""

    dtype: str
    shape: tuple[int, ...]
    shard: Shard | None = None

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return prod(self.shape) * DTYPES[self.dtype]

    def pack(self) -> bytes:
        """HEAD_BYTES. Raises NotATensor for what the format cannot hold."""
        if self.dtype not in DTYPES:
            raise NotATensor(f"the format has no dtype {self.dtype}")
        if len(self.shape) > DIMS_MAX:
            raise NotATensor(f"the format has no more than {DIMS_MAX} dimensions, and the tensor {len(self.shape)}")
        shard = self.shard
        whole = self.shape if shard is None else shard.shape
        kind = WHOLE if shard is None else SHARD
        number = NAMES.index(self.dtype)
        packed = FIXED.pack(
            MAGIC, VERSION, HEAD_BYTES, number, len(self.shape), kind, HEAD_BYTES, self.nbytes
        ) + SHAPES.pack(*_padded(whole), *_padded(self.shape))
        if shard is not None:
            packed += AXIS.pack(1, TP, 0, shard.rank, shard.count, shard.dim, self.shape[shard.dim])
        return packed.ljust(HEAD_BYTES, b"\0")

    @staticmethod
    def unpack(block: bytes | bytearray | memoryview, nbytes: int) -> TensorHead:
        """The head of a value of `nbytes` that begins with `block`. Raises NotATensor, also if its elements have not
        the number of bytes that follow the head."""
        if len(block) < HEAD_BYTES:
            raise NotATensor("the value is shorter than the head of a tensor")
        magic, version, length, number, dims, kind, start, data = FIXED.unpack_from(block)
        if (magic, version, length, start) != (MAGIC, VERSION, HEAD_BYTES, HEAD_BYTES):
            raise NotATensor("the value does not begin with the head of a tensor of this version")
        if not 0 <= number < len(NAMES) or not 0 <= dims <= DIMS_MAX or kind not in (WHOLE, SHARD):
            raise NotATensor(f"dtype {number}, {dims} dimensions, kind {kind}")
        shapes = SHAPES.unpack_from(block, FIXED.size)
        whole, shape = shapes[:dims], shapes[DIMS_MAX : DIMS_MAX + dims]
        shard = None
        if kind == SHARD:
            axes, axis, _, rank, count, dim, _ = AXIS.unpack_from(block, FIXED.size + SHAPES.size)
            if axes == 1 and axis == TP:  # other axes are of no use here: the elements are what they are
                shard = Shard(rank, count, dim, whole)
        head = TensorHead(NAMES[number], shape, shard)
        if min(shape, default=0) < 0 or head.nbytes != data or HEAD_BYTES + data != nbytes:
            raise NotATensor(f"a {head.dtype} tensor of shape {shape} in {nbytes} bytes")
        return head


def shards(head: TensorHead, count: int, dim: int) -> list[TensorHead]:
    """The heads of `count` equal parts along dimension `dim`. Raises NotATensor where there are none."""
    if count < 1 or not 0 <= dim < len(head.shape) or head.shape[dim] % count:
        raise NotATensor(f"shape {head.shape} cannot be split into {count} equal parts along dimension {dim}")
    shape = (*head.shape[:dim], head.shape[dim] // count, *head.shape[dim + 1 :])
    return [TensorHead(head.dtype, shape, Shard(rank, count, dim, head.shape)) for rank in range(count)]


def _padded(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *[-1] * (DIMS_MAX - len(shape)))
