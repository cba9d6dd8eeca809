"""Matrices of a GGUF file as they are stored, and any checkpoint quantized while loading."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.checkpoint import weights
from engine.checkpoint.model_source import describe, with_weights_in
from engine.checkpoint.quantized_weights import kept, load_quantized
from engine.model.model_error import ModelError
from engine.model.ops.quantized import Quantized

torch.set_num_threads(1)


def in_type(values: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
    return values.astype(np.float16) if kind is Type.F16 else gguf.quantize(values, kind), kind


def matrix_names(loaded) -> list[str]:
    return [name for name, weight in loaded.items() if isinstance(weight, Quantized)]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_stored_matrices_keep_their_bytes(tiny_gguf, kind):
    """q and k too, but for the order of their rows: widened, they are what a plain load gives."""
    tensors = tiny_gguf.tensors()
    held = {name: in_type(values, Type[kind]) if values.ndim == 2 else values for name, values in tensors.items()}
    source = describe(str(tiny_gguf(held)))
    seen: list[tuple[int, int]] = []
    loaded = load_quantized(source, "stored", torch.bfloat16, lambda *at: seen.append(at))
    plain = weights.load(source, torch.bfloat16)
    assert list(loaded) == list(plain) and seen[-1][0] == seen[-1][1]
    assert matrix_names(loaded) == [name for name, weight in plain.items() if weight.ndim == 2]
    for name, weight in loaded.items():
        if isinstance(weight, Quantized):
            assert (weight.kind, weight.dtype, weight.shape) == (kind.lower(), torch.bfloat16, tuple(plain[name].shape))
            torch.testing.assert_close(weight.widened(), plain[name], rtol=2**-7, atol=1e-6)
        else:
            assert torch.equal(weight, plain[name])
    rows, _ = held["blk.1.ffn_down.weight"]
    assert bytes(loaded["layers.1.down"].blocks.numpy()) == rows.tobytes()


def test_types_without_kernels_and_mixed_products_are_widened_and_named(tiny_gguf, caplog):
    tensors = tiny_gguf.tensors()
    held = {name: in_type(v, Type.Q4_0) if v.ndim == 2 else v for name, v in tensors.items()}
    held["blk.0.attn_v.weight"] = in_type(tensors["blk.0.attn_v.weight"], Type.F16)
    held["blk.1.ffn_down.weight"] = in_type(tensors["blk.1.ffn_down.weight"], Type.Q5_0)
    source = describe(str(tiny_gguf(held)))
    loaded = load_quantized(source, "stored", torch.float32)
    wide = {"layers.0.q", "layers.0.k", "layers.0.v", "layers.1.down"}
    every = {name for name, weight in weights.load(source, torch.float32).items() if weight.ndim == 2}
    assert set(matrix_names(loaded)) == every - wide
    assert "1 matrices (q5_0) are widened to float32: layers.1.down" in caplog.text
    assert "2 matrices (q4_0) are widened to float32: layers.0.q, layers.0.k" in caplog.text
    assert "1 matrices (f16) are widened to float32: layers.0.v" in caplog.text


@pytest.mark.parametrize(("weight_dtype", "kind"), [("int8", "q8_0"), ("int4", "q4_1"), ("mxfp4", "mxfp4")])
def test_any_checkpoint_is_quantized_while_loading(tiny_gguf, weight_dtype, kind):
    """float16 here: every value within half a step of its group."""
    tensors = {name: in_type(v, Type.F16) if v.ndim == 2 else v for name, v in tiny_gguf.tensors().items()}
    source = describe(str(tiny_gguf(tensors)))
    loaded, plain = load_quantized(source, weight_dtype, torch.float32), weights.load(source, torch.float32)
    assert loaded["embed"].kind == "q8_0"
    for name in matrix_names(loaded):
        if name != "embed":
            assert loaded[name].kind == kind
        groups = plain[name].view(len(plain[name]), -1, 32)
        most = groups.abs().amax(-1)
        spread = {
            "q8_0": most / 127,
            "q4_1": (groups.amax(-1) - groups.amin(-1)) / 15,
            # The largest number is 4 to 8 times the scale, of which 6 is the largest code: steps are 2 there.
            "mxfp4": most,
        }[loaded[name].kind]
        error = (loaded[name].widened() - plain[name]).view_as(groups).abs().amax(-1)
        # The scale and the minimum are rounded to float16: 2^-11 of the largest value, and of 15 steps.
        assert (error <= 0.5 * spread + 2**-10 * most).all(), name
    assert torch.equal(loaded["norm"], plain["norm"])


def test_inputs_that_are_no_whole_groups_stay_wide(tiny_gguf, caplog):
    source = describe(str(tiny_gguf()))
    odd = replace(source.config, intermediate_size=40)
    dummy = replace(source, format="dummy", config=odd, files=())
    loaded = load_quantized(dummy, "int8", torch.float32)
    assert isinstance(loaded["layers.0.gate"], Quantized)
    assert not isinstance(loaded["layers.0.down"], Quantized)
    assert f"{odd.num_layers} matrices (40 inputs) are widened to float32: layers.0.down" in caplog.text


def test_what_cannot_work_is_refused_by_the_flag(tiny_gguf):
    source = describe(str(tiny_gguf()))
    with pytest.raises(ModelError, match=r"--weight-dtype stored: tiny is not a GGUF file, nor"):
        load_quantized(replace(source, format="dummy"), "stored", torch.float32)


def test_experts_are_quantized_while_loading(tiny_gguf):
    source = describe(str(tiny_gguf()))
    experts = replace(source.config, num_experts=4, experts_per_token=2, expert_size=32)
    loaded = load_quantized(replace(source, format="dummy", config=experts, files=()), "int8", torch.float32)
    assert {
        name for name, weight in loaded.items() if weight.dtype == torch.float32 and not isinstance(weight, Quantized)
    } == {name for name in loaded if "norm" in name or name.endswith("router")}


def test_all_parts_of_a_product_are_kept_or_none():
    layer = {f"layers.0.{name}": "q4_0" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    sizes = dict.fromkeys(layer, (64, 64))
    assert kept(layer | {"embed": "q8_0", "norm": "f32"}, sizes) == {*layer, "embed"}
    assert kept(layer | {"layers.0.up": "q4_1"}, sizes) == layer.keys() - {"layers.0.gate", "layers.0.up"}
    assert kept(layer | {"layers.0.o": "f16", "embed": "q5_0"}, sizes) == layer.keys() - {"layers.0.o"}
    assert kept(layer | {"layers.0.v": "q6_k"}, sizes) == layer.keys()
    three = layer.keys() - {f"layers.0.{name}" for name in "qkv"}
    assert kept(layer | {"layers.0.v": "f16"}, sizes) == three
    assert kept(layer | {"layers.0.v": "q6_k"}, sizes | {"layers.0.k": (40, 64)}) == three


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_types_in_blocks_of_256_keep_their_bytes(tiny_gguf, kind):
    """Also where v and down have another type, as in files called Q4_K_M."""
    held = tiny_gguf.in_blocks(kind, {"blk.1.attn_v.weight": "Q6_K", "blk.0.ffn_down.weight": "Q5_K"})
    source = describe(str(tiny_gguf(held)))
    loaded, plain = load_quantized(source, "stored", torch.float32), weights.load(source, torch.float32)
    assert matrix_names(loaded) == [name for name, weight in plain.items() if weight.ndim == 2]
    for name in matrix_names(loaded):
        assert torch.equal(loaded[name].widened(), plain[name]), name
    assert [loaded[f"layers.{i}.v"].kind for i in range(2)] == [kind.lower(), "q6_k"]
    assert bytes(loaded["layers.1.down"].blocks.numpy()) == held["blk.1.ffn_down.weight"][0].tobytes()


def test_other_weights_have_another_fingerprint(tiny_gguf):
    """KV of weights rounded while loading is never found under others' keys; `stored` are the weights of the file."""
    source = describe(str(tiny_gguf()))
    others = ("int8", "int4", "fp8", "mxfp4")
    dtypes = ("auto", "wide", "stored", *others)
    prints = {dtype: with_weights_in(source, dtype).fingerprint for dtype in dtypes}
    assert prints["auto"] == prints["wide"] == prints["stored"] == source.fingerprint
    assert len({prints["auto"], *(prints[dtype] for dtype in others)}) == 5
    assert all(len(value) == 32 for value in prints.values())
