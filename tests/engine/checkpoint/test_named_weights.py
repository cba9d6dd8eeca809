"""Weights from tensors under the names of checkpoints: what is refused with which words, and what identifies them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from cache.named.names import Head
from cache.named.tensor_format import Shard, TensorHead
from cache.named.tensors import FoundTensor
from engine.checkpoint.loop_calls import LoopCalls
from engine.checkpoint.model_source import ModelSource
from engine.checkpoint.named_weights import NamedWeights, UnfitTensors, named
from engine.checkpoint.quantized_weights import load_quantized
from engine.checkpoint.safetensors_weights import checkpoint_names, gemma_names, layer_names, our_name
from engine.checkpoint.weights import DummyWeights, load, shapes
from engine.model.latent_config import Latent
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_size=32,
    intermediate_size=96,
    vocab_size=50,
    tie_word_embeddings=True,
)
MOE = replace(LLAMA, num_experts=4, experts_per_token=2, expert_size=32)
GEMMA = replace(LLAMA, post_norms=True)
OLMO = replace(GEMMA, no_input_norms=True, joint_qk_norm=True)
LATENT = Latent(rank=16, rope_size=8, nope_size=8, value_size=8, query_rank=12)
DEEPSEEK = replace(MOE, head_size=24, latent=LATENT, shared_size=32)


class Tensors(dict):
    """What NamedTensors promises, over a dictionary of tensors by name."""

    async def find(self, names: list[str]) -> dict[str, FoundTensor | None]:
        return {name: _found(name, self[name]) for name in names if name in self}

    async def read(self, found: FoundTensor, into: memoryview) -> bool:
        if found.value.name not in self:
            return False
        into[:] = self[found.value.name].contiguous().flatten().view(torch.uint8).numpy().data
        return True


def _found(name: str, tensor: Any) -> FoundTensor | None:
    if tensor is None:
        return None
    shard = Shard(0, 2, 0, tuple(tensor.shape)) if name.endswith("_tp_0") else None
    head = TensorHead(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), shard)
    return FoundTensor(head, Head(name, head.nbytes), b"")


def put(config: ModelConfig, prefix: str = "p/", seed: int = 1) -> Tensors:
    reader = DummyWeights(config, seed)
    names = checkpoint_names(reader.shapes(), config)
    return Tensors({prefix + names[ours][-1]: reader.read(ours) for ours in reader.shapes()})


async def with_reader(tensors: Tensors, work: Any, config: ModelConfig = LLAMA, prefix: str = "p/") -> Any:
    """work(reader), in a thread as a node does it."""
    calls = LoopCalls()
    return await asyncio.to_thread(lambda: work(NamedWeights.find(tensors, calls, prefix, config)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config", [LLAMA, MOE, GEMMA, OLMO, DEEPSEEK, replace(LLAMA, tie_word_embeddings=False, qkv_bias=True)]
)
def test_every_weight_has_the_names_that_checkpoints_use(config):
    names = checkpoint_names(shapes(config), config)
    known = gemma_names if config.post_norms else layer_names
    assert list(names) == list(shapes(config))
    for ours, theirs in names.items():
        assert theirs and all(our_name(one, known) == ours for one in theirs)


@pytest.mark.parametrize("config", [LLAMA, MOE, GEMMA, OLMO, DEEPSEEK])
async def test_the_tensors_become_the_weights(config):
    source = ModelSource("m", None, "dummy", config, "")  # type: ignore[arg-type]
    tensors = put(config)

    def work(reader: NamedWeights) -> Any:
        return load(source, torch.float32, opened=reader.opened()), reader.key()

    made, key = await with_reader(tensors, work, config)
    expected = DummyWeights(config, 1)
    assert made.keys() == shapes(config).keys() and len(key) == 16
    assert all(torch.equal(weight, expected.read(name)) for name, weight in made.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"together": True}, "all experts in one tensor"),
        ({"fused": True}, "gate and up in one tensor"),
        ({"interleaved": True}, "rows in another order"),
    ],
)
def test_checkpoints_that_cannot_be_read_by_name_are_refused(changes, words):
    with pytest.raises(UnfitTensors, match=words):
        named(shapes(LLAMA), replace(LLAMA, **changes))


async def test_the_content_identifies_them_and_not_the_prefix():
    source = ModelSource("m", None, "dummy", LLAMA, "")  # type: ignore[arg-type]

    def key(reader: NamedWeights) -> bytes:
        load(source, torch.bfloat16, opened=reader.opened())
        return reader.key()

    one = await with_reader(put(LLAMA), key)
    assert one == await with_reader(put(LLAMA, prefix="q/"), key, prefix="q/")
    assert one != await with_reader(put(LLAMA, seed=2), key)
    changed = put(LLAMA)
    changed["p/model.norm.weight"] = changed["p/model.norm.weight"].clone()
    changed["p/model.norm.weight"][3] += 1e-6
    assert one != await with_reader(changed, key)


async def test_they_are_quantized_like_those_of_a_file():
    source = ModelSource("m", None, "dummy", LLAMA, "", seed=1)  # type: ignore[arg-type]
    expected = load_quantized(source, "int8", torch.float32)
    made = await with_reader(put(LLAMA), lambda r: load_quantized(source, "int8", torch.float32, opened=r.opened()))
    for name, weight in made.items():
        one, other = (each.widened() if hasattr(each, "widened") else each for each in (weight, expected[name]))
        assert torch.equal(one, other)


async def test_everything_that_is_wrong_is_said_at_once():
    tensors = put(LLAMA)
    for layer in range(2):
        del tensors[f"p/model.layers.{layer}.self_attn.q_proj.weight"]
    tensors["p/model.norm.weight"] = None
    tensors["p/model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 63)
    tensors["p/model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
    with pytest.raises(UnfitTensors) as refused:
        await with_reader(tensors, lambda reader: reader)
    told = str(refused.value)
    assert told.startswith("the tensors under 'p/' are not the model's: 2 of 20 (p/model.layers.0.self_attn.q_proj")
    assert "are missing; 1 of 20 (p/model.norm.weight) is no whole tensor" in told
    assert "p/model.layers.0.mlp.up_proj.weight [96, 63] instead of [96, 64]) is of another shape" in told
    assert told.endswith("up_proj.weight int8) is of another type than float32, bfloat16, float16")
    with pytest.raises(UnfitTensors, match=r"20 of 20 \(q/.* and 17 more\) are missing"):
        await with_reader(put(LLAMA), lambda reader: reader, prefix="q/")


async def test_a_tensor_that_is_gone_when_it_is_read_is_an_error():
    tensors = put(LLAMA)

    def work(reader: NamedWeights) -> None:
        tensors.clear()
        reader.read("norm")

    with pytest.raises(ModelError, match="removed or replaced"):
        await with_reader(tensors, work)
