"""Weights from and to the pooled store, with a dictionary for the store, and calls from threads that must not hang."""

import asyncio
import json
import logging
import threading
from contextlib import nullcontext

import pytest
import torch

from cache.results import NoRoom
from engine.checkpoint import pooled_weights
from engine.checkpoint.loop_calls import LoopCalls
from engine.checkpoint.model_source import ModelSource, adopt, describe
from engine.checkpoint.pooled_weights import PooledWeights, prefix, publish
from engine.checkpoint.weights import KeptWeights, open_weights
from engine.model.model_config import ModelConfig
from engine.model.model_error import ModelError

TENSORS = {"norm": torch.arange(5.0), "embed": torch.randn(7, 3, generator=torch.Generator().manual_seed(1))}


class Objects(dict):
    """What cache.store.objects.Objects promises."""

    full = False
    away = 0  # reads that find nothing

    async def exists(self, name):
        return name in self

    async def put(self, name, data):
        if self.full:
            raise NoRoom("no room in the pool: see --dram-bytes")
        self[name] = bytes(data)

    async def get(self, name):
        return self.get_now(name)

    def get_now(self, name):
        return dict.get(self, name)

    async def get_into(self, name, into):
        if self.away:
            self.away -= 1
            return None
        if name not in self:
            return None
        into[: len(self[name])] = self[name]
        return len(self[name])


async def pulled(objects):
    """find and read, as the loading thread does."""
    calls = LoopCalls()

    def work():
        found = PooledWeights.find(objects, calls, "f1", "bfloat16")
        return None if found is None else {name: found.read(name) for name in found.shapes()}

    return await asyncio.to_thread(work)


async def test_what_was_published_is_pulled():
    objects = Objects()
    assert await pulled(objects) is None
    await publish(objects, "f1", "bfloat16", nullcontext(KeptWeights(TENSORS)))
    found = await pulled(objects)
    assert found.keys() == TENSORS.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, TENSORS[name].bfloat16())


async def test_a_part_that_is_out_of_reach_for_a_moment_is_read_when_it_is_back(monkeypatch, caplog):
    """A starting node whose process gets no processor for seconds counts as dead, and its homes refuse it until it has
    refuted this."""
    caplog.set_level(logging.INFO, "mooncake.weights")
    monkeypatch.setattr(pooled_weights, "AGAIN_S", 0.01)
    objects = Objects()
    await publish(objects, "f1", "bfloat16", nullcontext(KeptWeights(TENSORS)))
    objects.away = 3
    found = await pulled(objects)
    assert objects.away == 0 and torch.equal(found["norm"], TENSORS["norm"].bfloat16())
    assert caplog.text.count("is not in the pooled store now: once more") == 3


async def test_a_part_that_was_lost_is_an_error_with_a_remedy_and_is_published_again(monkeypatch):
    monkeypatch.setattr(pooled_weights, "AGAIN_S", 0.01)
    monkeypatch.setattr(pooled_weights, "PATIENCE_S", 0.1)
    objects = Objects()
    await publish(objects, "f1", "bfloat16", nullcontext(KeptWeights(TENSORS)))
    del objects[prefix("f1", "bfloat16") + "/norm"]
    with pytest.raises(
        ModelError, match=r"lost a part of the weights \(norm\): start a node with --weights-from-store"
    ):
        await pulled(objects)
    await publish(objects, "f1", "bfloat16", nullcontext(KeptWeights(TENSORS)))
    assert len(await pulled(objects)) == 2


async def test_a_full_pool_gets_no_list_of_weights(caplog):
    objects = Objects()
    objects.full = True
    await publish(objects, "f1", "bfloat16", nullcontext(KeptWeights(TENSORS)))
    assert objects == {}
    assert "see --dram-bytes" in caplog.text


async def test_stop_lets_waiting_threads_go():
    calls, waiting = LoopCalls(), threading.Event()

    async def never():
        waiting.set()
        await asyncio.Event().wait()

    thread = asyncio.create_task(asyncio.to_thread(calls.wait, never()))
    await asyncio.to_thread(waiting.wait, 10)
    calls.stop()
    calls.stop()
    done, _ = await asyncio.wait([thread], timeout=10)
    assert done
    with pytest.raises(asyncio.CancelledError):
        await asyncio.to_thread(calls.wait, never())


def test_a_directory_without_weights_needs_a_cluster(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    config |= {"intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 10, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        describe(str(tmp_path))
    source = describe(str(tmp_path), pooled=True)
    assert source.format == "pooled"
    with pytest.raises(ModelError, match="give --join"):
        adopt(source, None)
    adopted = adopt(source, {"fingerprint": "f1"})
    assert adopted.fingerprint == "f1"
    with pytest.raises(ModelError, match="the cluster's pooled store does not have its weights"):
        open_weights(adopted, torch.float32, None)


def test_a_source_with_weights_keeps_its_own_fingerprint(tmp_path):
    shape = ModelConfig(
        num_layers=1, hidden_size=2, num_heads=1, num_kv_heads=1, head_size=2, intermediate_size=1, vocab_size=1
    )
    source = ModelSource("m", tmp_path, "dummy", shape, "own")
    assert adopt(source, {"fingerprint": "theirs"}) is source
