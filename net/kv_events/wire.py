"""The messages of KV events: MessagePack of the structs that vLLM 0.32 publishes. Pure.

A batch is an array: [unix seconds, events, data parallel rank]. An event is a map whose field `type` names its kind.
The hash of a block is an integer of 64 bits, or bytes; it only has to be the same in all events of one publisher.
Decoding ignores unknown fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

BlockHash = int | bytes

ARENA = "GPU"
"""`medium` of blocks that the engine computes with. vLLM uses this name on CPUs, too."""

RANK = 0
"""A node is one data parallel rank."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks that follow each other in one prompt became reusable."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # the block before the first of them; None at the begin of a prompt
    token_ids: list[int]  # of all these blocks
    block_size: int  # tokens
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None  # per block: what else than tokens its hash depends on
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks are no longer reusable."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """No block is reusable any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Events in the order in which they happened."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class EventError(ValueError):
    """The bytes are no batch of events."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode(unix_s: float, events: Sequence[Event]) -> bytes:
    return _encoder.encode(Batch(unix_s, list(events), RANK))


def decode(payload: bytes) -> Batch:
    """Raises EventError."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise EventError(str(error)) from None
