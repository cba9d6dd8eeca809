"""The bytes of KV events are those of vLLM's structs: an array for a batch, a map with `type` for an event."""

from __future__ import annotations

import msgspec
import pytest

from net.kv_events import wire
from net.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored


def stored(**more):
    fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2, "lora_id": None}
    return BlockStored(**fields | {"medium": "GPU", "lora_name": None} | more)


def test_the_form_is_vllms():
    plain = msgspec.msgpack.decode(
        wire.encode(1.5, [stored(group_idx=0), BlockRemoved([1], "GPU", 0), AllBlocksCleared()])
    )
    assert plain == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "parent_block_hash": None,
                "token_ids": [5, 6],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
            },
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_what_is_encoded_is_decoded():
    events = [stored(extra_keys=[["salt"]], kv_cache_spec_kind="full_attention"), BlockRemoved([2**64 - 1], None)]
    assert wire.decode(wire.encode(2.0, events)).events == events


def test_hashes_may_be_bytes_and_fields_may_be_new():
    event = {"type": "BlockRemoved", "block_hashes": [b"h" * 32], "medium": "CPU", "later": {"a": 1}}
    batch = wire.decode(msgspec.msgpack.encode([1.0, [event]]))
    assert batch.events == [BlockRemoved([b"h" * 32], "CPU")] and batch.data_parallel_rank is None


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "Other"}]]), b"\x93"])
def test_other_bytes_are_refused(payload):
    with pytest.raises(wire.EventError):
        wire.decode(payload)
