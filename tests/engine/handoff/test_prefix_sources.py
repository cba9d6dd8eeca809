"""Which source of a prefix is taken, if any: other arenas, DRAM and SSD of the pool, or computing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest

from cache.block import BlockGeometry
from cache.layer_groups import group_key, layer_groups
from cache.pool.borders import borders_of
from cache.results import GetResult, LeadingRun
from engine.core.costs import StepCosts
from engine.handoff.arenas import HANDED_OVER_MAX, Arenas
from engine.handoff.prefix_sources import OthersArenas, PrefixSources, Prices
from sched.gossip.digest import CuckooDigest, assemble, key64
from sched.gossip.holders import Holders

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
KEYS = [blake2b(bytes([i]), digest_size=16).digest() for i in range(10)]


def holders(state: Sequence[bytes] = (), **held: int) -> Holders:
    """Nodes with so many leading KEYS each, and `state`."""
    found = Holders()
    for number, (node, count) in enumerate(held.items()):
        digest = CuckooDigest(epoch=number + 1)
        for key in (*KEYS[:count], *state):
            digest.add(key64(key))
        while digest.take_delta() is not None:
            pass
        copy = assemble(digest.pages())
        assert copy is not None
        found.admit(node)
        found.load(node, *copy)
    return found


def test_digests_tell_who_has_more_than_is_here():
    arenas = Arenas("me", lambda: holders(me=10, d1=4, d2=7, dead=9), lambda node: node != "dead")
    assert arenas.beyond(KEYS, 2) == {"d1": 2, "d2": 5}
    assert arenas.beyond(KEYS, 4) == {"d2": 3}
    assert arenas.beyond(KEYS, 10) == {}


def test_who_decodes_the_prompt_in_front_may_have_the_rest():
    """Before any digest says so."""
    arenas = Arenas("me", Holders, lambda node: True)
    assert arenas.beyond(KEYS, 4) == {}
    arenas.handed_over(KEYS[3], "d")
    assert arenas.beyond(KEYS, 4) == {"d": 6}
    assert arenas.beyond(KEYS, 4, pooled=3) == {"d": 3}, "it has put that into the pool"
    assert arenas.beyond(KEYS, 3) == arenas.beyond(KEYS, 5) == {}
    for i in range(HANDED_OVER_MAX):
        arenas.handed_over(i.to_bytes(16, "big"), "d")
    assert arenas.beyond(KEYS, 4) == {}, "what is remembered is bounded"


class Pool:
    def __init__(self, run: LeadingRun) -> None:
        self.run = run

    async def find(self, keys: Any) -> LeadingRun:
        return self.run

    async def exists_many(self, keys: Any) -> list[bool]:
        return [True] * len(keys)

    async def get(self, keys: Any, block_ids: Any) -> GetResult:
        return GetResult(0, 0)


def sources(
    run: LeadingRun | None = None,
    arenas: Arenas | None = None,
    policy: str = "auto",
    geometry: BlockGeometry = GEOMETRY,
    **rails: Any,
) -> Any:
    """Computing a block of 4 tokens takes 4 ms."""
    costs, pool = StepCosts(), None if run is None else Pool(run)
    for _ in range(16):
        for tokens in (40, 400):
            costs.prefill.observe(tokens, 0, tokens * 1e-3)
    chosen: Any = pool
    # type: ignore[arg-type]
    others = None if arenas is None else OthersArenas(arenas, Pool(LeadingRun(0)))
    return PrefixSources(chosen, chosen, others, geometry, Prices(costs, **rails), policy)


async def found(of: Any, first: int = 0) -> list[tuple[str, int]]:
    return [(source.name, len(source.keys)) for source in await of.of(KEYS, first)]


async def test_a_slow_disk_leaves_the_blocks_behind_it_to_be_computed():
    quick, slow = LeadingRun(8, 5, 3, 0.001), LeadingRun(8, 5, 3, 1.0)
    assert (await found(sources(quick)))[0] == ("pool", 8)
    assert await found(sources(slow)) == [("pool", 5)], "what is in DRAM alone"
    assert await found(sources(LeadingRun(8, 0, 8, 1.0))) == []
    assert (await found(sources(slow, policy="always")))[0] == ("pool", 8)
    assert await found(sources(quick, policy="never")) == []


async def test_what_ssd_takes_is_in_the_estimate():
    (whole, dram) = await sources(LeadingRun(8, 5, 3, 0.004)).of(KEYS, 0)
    assert (len(whole.keys), len(dram.keys)) == (8, 5)
    assert whole.load_s == pytest.approx(dram.load_s + 0.004, abs=1e-4)


async def test_the_arena_of_another_node_is_taken_where_it_pays():
    arenas = Arenas("me", lambda: holders(a=6, b=9), lambda node: True)
    assert await found(sources(None, arenas)) == [("b", 9)]
    assert await found(sources(None, arenas), first=7) == [("b", 2)]
    far = {"node_s": lambda node, nbytes: 9.0 if node == "b" else 0.0}
    assert await found(sources(None, arenas, **far)) == [("a", 6)], "the way to b is slow"
    assert await found(sources(None, arenas, node_s=lambda node, nbytes: 9.0)) == [], "computed"
    assert await found(sources(LeadingRun(4, 4), arenas)) == [("b", 9), ("pool", 4)]
    assert (await found(sources(LeadingRun(10, 10), arenas)))[0] == ("pool", 10)


async def test_with_states_a_prefix_ends_where_its_source_has_one():
    """The digest of b tells KV of nine blocks and a state behind seven; a load brings the state along."""
    groups = layer_groups((), [True, False, False], 5 * GEOMETRY.block_bytes, GEOMETRY.layer_bytes)
    assert groups is not None
    with_states, sizes = replace(GEOMETRY, groups=groups), list[int]()
    digests = holders(b=9, state=[group_key(KEYS[6], groups.first_state)])

    def arenas() -> Arenas:
        return Arenas("me", lambda: digests, lambda node: True, borders_of(with_states))

    def homes_s(keys: Any, nbytes: int) -> float:
        sizes.append(nbytes)
        return 0.0

    def node_s(node: str, nbytes: int) -> float:
        return homes_s(node, nbytes)

    assert await found(sources(None, arenas(), geometry=with_states, node_s=node_s)) == [("b", 7)]
    assert await found(sources(None, arenas(), geometry=with_states), first=7) == []
    assert await found(sources(LeadingRun(4, 4), geometry=with_states, homes_s=homes_s)) == [("pool", 4)]
    assert sizes == [(7 + 5) * GEOMETRY.block_bytes, (4 + 5) * GEOMETRY.block_bytes]
    decodes = arenas()
    decodes.handed_over(KEYS[3], "d")
    assert decodes.beyond(KEYS, 4) == {"b": 3}, "nobody knows yet where d will have states"


async def test_only_loads_without_a_disk_tell_how_fast_the_way_is():
    of = sources(LeadingRun(8, 8))
    (before,) = await of.of(KEYS, 0)
    for _ in range(32):
        of.observe(GetResult(8, 8 * GEOMETRY.pool_bytes, tiers={"dram": 5, "ssd": 3}), 0, 0.5)
    (same,) = await of.of(KEYS, 0)
    assert same.load_s == before.load_s
    for _ in range(32):
        of.observe(GetResult(8, 8 * GEOMETRY.pool_bytes, tiers={"dram": 8}), 0, 0.01)
    (slower,) = await of.of(KEYS, 0)
    assert slower.load_s == pytest.approx(0.01, rel=0.2)
    with of.loading(10 * 8 * GEOMETRY.pool_bytes):
        (behind,) = await of.of(KEYS, 0)
    assert behind.load_s > slower.load_s, "what is on its way already comes first"
