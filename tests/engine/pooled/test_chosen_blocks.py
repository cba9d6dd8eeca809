"""Blocks of the pool of which each is exact or in four bits, between two nodes, whatever moves them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import torch

from cache.pool.policy import PLAIN
from engine.pooled.chosen_blocks import ChosenBlocks
from tests.engine.node.test_encoded_layers import COUNT, HERE, KEYS, WHOLE, Node, geometry_of

GEOMETRY = geometry_of("int4-auto")


@dataclass
class Chosen:
    """Stands in for Rounding: the test says which keys are rounded."""

    keys: set[bytes] = field(default_factory=set)

    def pays(self, key: bytes) -> bool:
        return key in self.keys


@pytest.fixture(params=[("shm", "tcp"), ("tcp",)], ids=str)
async def nodes(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Node, Node, Chosen]]:
    """Two homes; `a` has random KV in its arena and puts what the test asks."""
    rule = Chosen()
    both = [Node(name, request.param, GEOMETRY, 3, rule) for name in ("a", "b")]  # less staging than what is put
    for node in both:
        node.address = await node.channel.start("127.0.0.1", 0)
    a, b = both
    a.channel.introduce("b", b.address)
    b.channel.introduce("a", a.address)
    a.kv[:COUNT] = torch.randn(COUNT, *GEOMETRY.shape, generator=torch.Generator().manual_seed(4))
    yield a, b, rule
    for node in both:
        await node.close()


def error(a: Node, b: Node, place: int) -> float:
    found: float = (a.kv[HERE[place]].float() - b.kv[WHOLE[place]].float()).abs().max().item()
    return found


@pytest.mark.parametrize("short", [range(0), range(COUNT), range(0, COUNT, 2), range(7, COUNT)], ids=str)
async def test_each_block_comes_back_in_its_form(nodes, short):
    a, b, rule = nodes
    assert isinstance(a.pool, ChosenBlocks)
    rule.keys = {KEYS[place] for place in short}
    assert await a.pool.put(KEYS, HERE, [PLAIN] * COUNT) == COUNT
    result = await b.pool.get(KEYS, WHOLE)
    exact = COUNT - len(short)
    assert result.blocks == COUNT
    assert result.nbytes == exact * GEOMETRY.block_bytes + len(short) * GEOMETRY.int4_bytes
    assert result.saved_bytes == COUNT * GEOMETRY.block_bytes - result.nbytes
    for place in range(COUNT):
        assert 0 < error(a, b, place) < 0.3 if place in short else error(a, b, place) == 0
    assert a.pool.state()["put"] == b.pool.state()["got"] == {"exact": exact, "int4": len(short)}


async def test_a_prefix_comes_layer_by_layer_only_if_all_of_it_is_exact(nodes):
    a, b, rule = nodes
    rule.keys = {KEYS[-1]}
    await a.pool.put(KEYS, HERE, [PLAIN] * COUNT)
    async with b.pool.layers(KEYS, WHOLE) as found:
        assert found is None
    async with b.pool.layers(KEYS[:-1], WHOLE[:-1]) as found:
        assert await found.read(lambda layer: None)
    assert all(error(a, b, place) == 0 for place in range(COUNT - 1))


async def test_a_block_keeps_the_form_in_which_it_was_put_first(nodes):
    a, b, rule = nodes
    await a.pool.put(KEYS[:2], HERE[:2], [PLAIN] * 2)
    rule.keys = set(KEYS)
    assert await a.pool.put(KEYS[:3], HERE[:3], [PLAIN] * 3) == 1
    assert (await b.pool.get(KEYS, WHOLE)).blocks == 3
    assert [error(a, b, place) == 0 for place in range(3)] == [True, True, False]


async def test_a_block_of_neither_length_is_a_miss(nodes):
    a, b, _ = nodes
    await a.pool.put(KEYS[:3], HERE[:3], [PLAIN] * 3)
    region = a.arena.name
    await a.store.put_from([KEYS[3]], region, [0], [PLAIN], nbytes=GEOMETRY.int4_bytes - 1)
    await a.pool.put(KEYS[4:6], HERE[4:6], [PLAIN] * 2)
    assert (await b.pool.get(KEYS, WHOLE)).blocks == 3
