"""The parts of the simulator against what they stand for: step by step, byte by byte, set by set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.pool.policies import policies
from cache.pool.policy import PLAIN
from lab.simulator.models.caches import Cache, Directory
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import Network
from lab.simulator.models.segment import Segment
from lab.simulator.models.step_models import LLAMA3_70B, PRESETS, Geometry, Hardware, roofline, with_bandwidth

times = st.floats(1e-4, 0.1)


@given(base=times, slope=st.floats(0, 1e-6), batch=st.integers(1, 64), context=st.integers(0, 100_000))
def test_a_segment_is_its_steps_one_by_one(base, slope, batch, context):
    segment = Segment(0.0, 40, base, slope, batch, context)
    total = 0.0
    for steps in range(1, 41):
        total += base + slope * (context + batch * (steps - 1))
        assert segment.seconds(steps) == pytest.approx(total)
        assert segment.steps_until(total) == steps
        assert segment.steps_until(total * 0.999) == steps
    assert segment.steps_until(0.0) == 1


def test_flows_share_a_nic_and_leave_it_to_the_others():
    loop, ended = Loop(), {}
    net = Network(loop, bytes_s=100.0, latency_s=0.0)
    for name, source, target, nbytes in (("a", "x", "y", 100), ("b", "x", "z", 300), ("c", "u", "v", 100)):
        net.send(source, target, nbytes, lambda name=name: ended.setdefault(name, loop.now))
    loop.run()
    assert ended == {"c": pytest.approx(1.0), "a": pytest.approx(2.0), "b": pytest.approx(4.0)}
    assert net.bytes_moved == 500


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 1000), st.floats(0, 5)), max_size=12))
def test_no_nic_is_faster_than_it_is_and_every_flow_ends(flows):
    loop, ended = Loop(), []
    net = Network(loop, bytes_s=100.0, latency_s=0.01)
    for source, target, nbytes, at in flows:
        loop.at(at, net.send, f"n{source}", f"n{target}", nbytes, lambda: ended.append(loop.now))
    loop.run()
    assert len(ended) == len(flows)
    for node in range(4):
        sent = sum(nbytes for source, target, nbytes, _ in flows if source == node != target)
        assert max(ended, default=0.0) >= sent / 100 - 1e-6


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), max_size=60))
def test_a_directory_is_one_set_per_node(changes):
    directory, sets = Directory(5), [set() for _ in range(5)]
    for node, block, here in changes:
        directory.tell(0.0, node, block, here)
        (sets[node].add if here else sets[node].discard)(block)
    for blocks in ((0, 1, 2, 3), (3, 2), (6,), ()):
        wanted = []
        for held in sets:
            run = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
            wanted.append(run)
        assert directory.depths(0.0, blocks).tolist() == wanted


@pytest.mark.parametrize("holders", [1, 5, 7, 130, 200])
def test_a_directory_of_many_nodes_finds_few_and_many_holders(holders):
    directory, rng = Directory(200), np.random.default_rng(holders)
    first = set(rng.choice(200, holders, replace=False).tolist())
    second = set(rng.choice(sorted(first), (holders + 1) // 2, replace=False).tolist())
    for block, having in ((10, first), (11, second)):
        for node in having:
            directory.apply(node, block, True)
    assert directory.depths(0.0, [10, 11]).tolist() == [(i in first) + (i in second) for i in range(200)]


def test_what_was_told_counts_later():
    directory = Directory(2, delay_s=1.0)
    directory.tell(5.0, 1, 7, True)
    assert directory.depths(5.9, [7]).tolist() == [0, 0]
    assert directory.depths(6.0, [7]).tolist() == [0, 1]


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), max_size=40), st.integers(1, 12))
def test_a_cache_never_holds_more_than_it_may_and_tells_all_it_does(prompts, capacity):
    told = set()
    cache = Cache(policies["lru"](), capacity, lambda block, here: (told.add if here else told.discard)(block))
    for blocks in prompts:
        if len(blocks) <= capacity:
            cache.use(blocks, [PLAIN] * len(blocks))
            assert cache.run(blocks) == len(blocks)
        assert cache.blocks == told and len(told) <= capacity
    cache.clear()
    assert not told


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_presets_are_plausible(model):
    assert model.prompt_s(4096, 0) > model.prompt_s(4096, 0) / 2 > 0
    assert model.prompt_s(1000, 3000) < model.prompt_s(4000, 0)
    assert model.decode_s(1, 0) < model.decode_s(8, 8000) < 8 * model.decode_s(1, 1000)
    assert model.mixed_s([(512, 0)], 8, 8000) < model.prefill_s(512, 0) + model.decode_s(8, 8000)
    assert with_bandwidth(model, 8).nic_bytes_s == 1e9


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        roofline("big", LLAMA3_70B, Hardware(1e12, 1e12, 80e9, 1e9))
    assert Geometry(7e9, 32, 4096, 8, 128).token_bytes == 131072
    with pytest.raises(ValueError, match="--nic-gbit-s"):
        with_bandwidth(PRESETS["embedded-cpu"], -1)


def test_kv_per_token_is_the_papers():
    assert np.isclose(LLAMA3_70B.token_bytes, 320 * 1024)
