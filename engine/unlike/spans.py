"""Where the tokens of a block lie in the blocks of another node: contiguous bytes, for transfers.

In a layer's part of a block, [planes, num_kv_heads, block_size, row], the tokens of one head are contiguous, so tokens
move between blocks of 16 and of 64 tokens as one span per head; of a quantized type as two, codes and scales. Between
blocks of equal size the layer's part moves as one span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cache.block import SCALE_BYTES, BlockGeometry, encodings

Run = tuple[int, int, int]
"""(offset in the source's part of a layer, offset in the target's, bytes)"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that lie side by side in a block of either node."""

    first: int  # token in the source's block
    block: int  # index of the target's block among those of the request
    start: int  # token in it
    count: int


def stretches(index: int, tokens: int, size: int, there: int, first_missing: int) -> Iterator[Stretch]:
    """The first `tokens` tokens of block `index` of a request, of `size` tokens each, in a node's blocks of `there`
    tokens. That node already has its first `first_missing` blocks, and they are left out."""
    begin, end = max(index * size, first_missing * there), index * size + tokens
    while begin < end:
        block, start = divmod(begin, there)
        count = min(end - begin, there - start)
        yield Stretch(begin - index * size, block, start, count)
        begin += count


def runs(source: BlockGeometry, first: int, target: BlockGeometry, start: int, count: int) -> Iterator[Run]:
    """Tokens [first, first + count) of a layer's part of a block of `source`, which are [start, start + count) in one
    of `target`. The two geometries differ in block_size at most."""
    if source.block_size == target.block_size:
        yield 0, 0, source.layer_bytes
        return
    row = source.head_size if source.dtype in encodings else source.row_bytes
    for head in range(source.planes * source.num_kv_heads):
        here = head * source.block_size * source.row_bytes
        there = head * target.block_size * target.row_bytes
        yield here + first * row, there + start * row, count * row
        if source.dtype in encodings:
            here, there = here + source.block_size * row, there + target.block_size * row
            yield here + SCALE_BYTES * first, there + SCALE_BYTES * start, SCALE_BYTES * count
