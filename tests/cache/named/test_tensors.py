"""Tensors that a program put into the pool, as a node reads them: whole values, values in parts, and what is none."""

import torch

from cache.named.tensors import NamedTensors
from connect.common.raw_memory import Pieces
from connect.store.named_values import NamedValues
from connect.store.tensor_memory import value_of, values_of_shards
from tests.cache.pooled import SLOT, cluster_of

GIVEN = {
    "small": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "fits": torch.randn(64, 10, generator=torch.Generator().manual_seed(1)),
    "parts": torch.randn(64, 100, generator=torch.Generator().manual_seed(2)),
    "edge": torch.randn((3 * SLOT - 304) // 4, generator=torch.Generator().manual_seed(3)),
    "half": torch.randn(33, 77, generator=torch.Generator().manual_seed(4)).bfloat16(),
}


async def read(tensors: NamedTensors, found) -> torch.Tensor | None:
    out = torch.empty(found.head.shape, dtype=getattr(torch, found.head.dtype))
    memory = out.flatten().view(torch.uint8).numpy().data
    return out if await tensors.read(found, memory) else None


async def test_what_was_put_is_found_and_read():
    async with cluster_of("a", "b", "c", slots=64) as cluster:
        values = NamedValues(cluster.stores["a"], "default")
        ends = await values.put([(f"p/{name}", value_of(tensor)) for name, tensor in GIVEN.items()])
        assert ends == [0] * len(GIVEN)
        tensors = NamedTensors(cluster.stores["b"], "default")
        found = await tensors.find([*(f"p/{name}" for name in GIVEN), "p/none"])
        assert set(found) == {f"p/{name}" for name in GIVEN}
        for name, tensor in GIVEN.items():
            head = found[f"p/{name}"].head
            assert (head.shape, head.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert torch.equal(await read(tensors, found[f"p/{name}"]), tensor)
        assert await NamedTensors(cluster.stores["b"], "another").find(["p/small"]) == {}


async def test_what_is_no_tensor_and_shards():
    async with cluster_of("a", "b", slots=64) as cluster:
        values, tensors = NamedValues(cluster.stores["a"], "t"), NamedTensors(cluster.stores["b"], "t")
        shards = values_of_shards(GIVEN["parts"], 2, 0)
        await values.put([("text", Pieces.of(b"hello")), ("long", Pieces.of(bytes(3 * SLOT))), ("shard", shards[1])])
        found = await tensors.find(["text", "long", "shard"])
        assert found["text"] is None and found["long"] is None
        assert found["shard"].head.shape == (32, 100) and found["shard"].head.shard.rank == 1


async def test_a_tensor_that_was_replaced_or_removed_since_is_missing():
    """Its elements never mix with those of another one."""
    async with cluster_of("a", "b", slots=64) as cluster:
        values, tensors = NamedValues(cluster.stores["a"], "t"), NamedTensors(cluster.stores["b"], "t")
        for name in ("small", "fits", "parts"):
            await values.put([(name, value_of(GIVEN[name]))])
            found = (await tensors.find([name]))[name]
            await values.remove([name])
            assert await read(tensors, found) is None
            await values.put([(name, value_of(GIVEN[name].reshape(-1)))])
            assert await read(tensors, found) is None, "the same bytes in another shape, or as other parts"
            again = (await tensors.find([name]))[name]
            assert torch.equal(await read(tensors, again), GIVEN[name].reshape(-1))
