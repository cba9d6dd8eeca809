"""Block geometry: the layout of one unit of KV.

A block holds the KV of `block_size` consecutive tokens for all layers as one contiguous span

    full      [num_layers, 2, num_kv_heads, block_size, head_size]      K and V of each head
    latent    [num_layers, 1, 1, block_size, row]                       one row for all heads (attention/latent.py)

so one layer's part is contiguous (pushed while later layers still compute) and the whole block is too (one span for
pool, wire and SSD). In a quantized arena elements are codes of one byte; the codes of each head are followed by the
scales of its tokens (attention/codes.py), within the layer's part.

All layers of a model that keep KV of tokens have one kind. In a model whose layers are in groups
(cache/layer_groups.py), a block holds the layers of one group, or a part of the states of layers that keep one. Every
number of bytes in the system follows from BlockGeometry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cache.layer_groups import STATE, LayerGroups, state_pieces

type_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}

encodings = ("fp8", "int8")
"""Types of one byte per element with float32 scales: one per token and head in the arena; one per head in blocks that
are converted on their way to the pool or to a decode node."""

pool_encodings = (*encodings, "int4")
"""Types of blocks that are converted on their way to the pool. int4: attention/nibbles_torch.py."""

INT4_WHEN_IT_PAYS = "int4-auto"
"""Blocks in the pool are as in the arena, or in int4: who puts a block decides by the link to its home
(engine/pooled/rounding.py). Its length says which it is."""

pool_types = (*pool_encodings, INT4_WHEN_IT_PAYS)
"""Values of `pool_dtype` other than the type of the arena."""

SCALE_BYTES = 4
GROUP_MAX = 32
"""Elements of int4 that share a smallest value and a step, at most."""

BlockKey = bytes
"""16 bytes."""

KEY_BYTES = 16
PLANES = {"full": 2, "latent": 1}
"""Kinds of KV -> what a layer keeps of a token: K and V, or the one row that is both."""


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Shape and size of one KV block."""

    num_layers: int  # of one group
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens
    dtype: str  # in the arena: a key of type_bytes, or one of `encodings`
    pool_dtype: str = ""  # in the pool: one of `pool_types`; any other value = as in the arena
    wire_dtype: str = ""  # from a prefill node to a decode node: one of `encodings`; any other value = the same
    kind: str = "full"  # a key of PLANES
    groups: LayerGroups | None = None  # None: all layers of the model are one group

    def like(self, dtype: str, block_size: int) -> BlockGeometry:
        """Of the blocks of a node whose blocks differ."""
        return replace(self, dtype=dtype, block_size=block_size)

    @property
    def num_groups(self) -> int:
        return 1 if self.groups is None else len(self.groups.windows)

    @property
    def model_layers(self) -> int:
        """Of all groups."""
        return self.num_layers if self.groups is None else len(self.groups.places)

    def pieces(self, layer: int) -> list[tuple[int, int, int]]:
        """Where a layer of the model lies: (group, offset in the group's blocks, bytes). A state may have several."""
        group, place = (0, layer) if self.groups is None else self.groups.places[layer]
        if self.groups is None or self.groups.windows[group] != STATE:
            return [(group, place * self.layer_bytes, self.layer_bytes)]
        found = state_pieces(place, self.groups.state_bytes, self.block_bytes)
        return [(group + part, offset, nbytes) for part, offset, nbytes in found]

    @property
    def state_blocks(self) -> int:
        """Blocks that the states of one request take."""
        return 0 if self.groups is None else self.groups.num_states

    def handover_blocks(self, tokens: int) -> int:
        """Blocks that a decode node needs of a prompt of `tokens` tokens."""
        return -(-tokens // self.block_size) if self.groups is None else self.groups.needed(tokens, self.block_size)

    def others_fetched(self, held: int, blocks: int) -> int:
        """Blocks of other groups that come with a prefix of `blocks` blocks to a node that can go on after `held`."""
        return 0 if self.groups is None else self.groups.others_fetched(held, blocks, self.block_size)

    @property
    def planes(self) -> int:
        """2: K and V. 1: one row that is both."""
        return PLANES[self.kind]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, planes, num_kv_heads, block_size, head_size]"""
        return (self.num_layers, self.planes, self.num_kv_heads, self.block_size, self.head_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of the key or the value (or the latent row) of one token and head in the arena, its scale included."""
        if self.dtype in encodings:
            return self.head_size + SCALE_BYTES
        return self.head_size * type_bytes[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of a block, which starts at layer * layer_bytes."""
        return self.planes * self.num_kv_heads * self.block_size * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def encoded(self) -> bool:
        """Whether blocks are converted between the arena and the pool, or may be."""
        return self.pool_dtype in pool_types and self.dtype not in encodings

    @property
    def rounded_when_it_pays(self) -> bool:
        """Whether a block in the pool is as in the arena or in int4."""
        return self.encoded and self.pool_dtype == INT4_WHEN_IT_PAYS

    @property
    def wire_encoded(self) -> bool:
        """Whether blocks are converted on the way from a prefill node to a decode node."""
        return self.wire_dtype in encodings and self.dtype not in encodings

    @property
    def encoded_layer_bytes(self) -> int:
        """Bytes of one layer of a converted block; its part starts at layer * encoded_layer_bytes."""
        return self.planes * self.num_kv_heads * (self.block_size * self.head_size + SCALE_BYTES)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of one converted block."""
        return self.num_layers * self.encoded_layer_bytes

    @property
    def pool_layer_bytes(self) -> int:
        """Bytes of one layer of a block that is converted for the pool; the most, if only some are."""
        if self.pool_dtype == INT4_WHEN_IT_PAYS:
            return self.layer_bytes
        return self._int4_layer_bytes if self.pool_dtype == "int4" else self.encoded_layer_bytes

    @property
    def int4_bytes(self) -> int:
        """Bytes of one block in int4."""
        return self.num_layers * self._int4_layer_bytes

    @property
    def _int4_layer_bytes(self) -> int:
        """Half a byte per element, and 4 bytes for each group: a channel of some tokens, for keys; some channels of a
        token, for values and latent rows."""
        tokens, channels = self.block_size, self.head_size
        groups = tokens * (channels // group_size(channels))
        if self.planes == 2:
            groups += tokens // group_size(tokens) * channels
        return self.num_kv_heads * (self.planes * tokens * channels // 2 + 4 * groups)

    @property
    def pool_bytes(self) -> int:
        """Bytes of one block in the pool; the most, if its form is chosen for each."""
        return self.num_layers * self.pool_layer_bytes if self.encoded else self.block_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes of one block on the way from a prefill node to a decode node."""
        return self.encoded_bytes if self.wire_encoded else self.block_bytes


def group_size(length: int) -> int:
    """Elements of a group of int4 along an axis of `length`: its largest divisor up to GROUP_MAX."""
    return next(size for size in range(min(length, GROUP_MAX), 0, -1) if length % size == 0)
