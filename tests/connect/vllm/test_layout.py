"""Where blocks lie: vLLM's tensors of one allocation, and what cannot be moved."""

from __future__ import annotations

import pytest
import torch

from connect.vllm.layout import Layout, NotSupported
from connect.vllm.options import Options

BLOCKS, HEADS, SIZE, WIDTH = 5, 2, 4, 6


def caches(num_layers=3, **other):
    whole = torch.zeros(num_layers, BLOCKS, HEADS, SIZE, WIDTH, **{"dtype": torch.bfloat16} | other)
    return {f"layer.{i}": whole[i] for i in range(num_layers)}


def test_a_block_of_a_layer_is_one_span():
    tensors = caches()
    tensors["shared"] = tensors["layer.1"]
    layout = Layout.of(tensors)
    layer_bytes = HEADS * SIZE * WIDTH * 2
    assert (layout.layer_bytes, layout.block_bytes, layout.nbytes) == (layer_bytes, 3 * layer_bytes, 15 * layer_bytes)
    assert layout.layer_of == {"layer.0": 0, "layer.1": 1, "layer.2": 2, "shared": 1}
    assert layout.pieces(4) == [(tensors[f"layer.{i}"][4].data_ptr(), layer_bytes) for i in range(3)]
    start = tensors["layer.0"].data_ptr()
    assert layout.places(2, [3, 0]) == [tensors["layer.2"][b].data_ptr() - start for b in (3, 0)]
    assert layout.parts == [(i * layer_bytes, layer_bytes) for i in range(3)]


def test_blocks_that_have_all_layers_together():
    whole = torch.zeros(BLOCKS, 3, HEADS, SIZE, WIDTH)
    tensors = {f"layer.{i}": whole[:, i] for i in range(3)}
    layout = Layout.of(tensors)
    assert layout.pieces(2) == [(tensors[f"layer.{i}"][2].data_ptr(), HEADS * SIZE * WIDTH * 4) for i in range(3)]


def test_what_cannot_be_moved_is_said():
    scattered = torch.zeros(BLOCKS, SIZE, HEADS, WIDTH).transpose(1, 2)
    for tensors, reason in (
        ({}, "no KV cache"),
        ({"a": scattered}, "not contiguous"),
        ({"a": torch.zeros(BLOCKS, 2), "b": torch.zeros(BLOCKS, 2)}, "separate"),
        ({"a": torch.zeros(BLOCKS, 2, device="meta")}, "meta"),
    ):
        with pytest.raises(NotSupported, match=reason):
            Layout.of(tensors)
    whole = torch.zeros(BLOCKS * 6)
    with pytest.raises(NotSupported, match="different sizes"):
        Layout.of({"a": whole[: BLOCKS * 2].view(BLOCKS, 2), "b": whole[BLOCKS * 2 :].view(BLOCKS, 4)})


def test_options():
    assert Options.of("kv_both", {}) == Options()
    made = Options.of("kv_consumer", {"staging_bytes": "1G", "wait_s": 2, "load": "layers", "master": "h:1"})
    assert (made.staging_bytes, made.wait_s, made.load, made.role) == (1 << 30, 2.0, "layers", "kv_consumer")
    for role, given, reason in (
        ("kv_both", {"mastr": "h:1"}, "mastr"),
        ("kv_both", {"load": "sometimes"}, "load is 'sometimes'"),
        ("kv_both", {"wait_s": -1}, "wait_s"),
        ("kv_producer", {"save": "none"}, "must save"),
        ("both", {}, "kv_role"),
    ):
        with pytest.raises(ValueError, match=reason):
            Options.of(role, given)
