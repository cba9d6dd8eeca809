"""Plans of weights beyond memory: what they take, what a pass costs, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sched.batching import DecodeFirst, MixedChunks, PrefillFirst, StepLoad
from sched.offload import (
    LEAST_RING,
    MOST_RING,
    MOST_ROWS,
    FilledSteps,
    Plan,
    Sizes,
    Speed,
    choose,
    described,
    no_room,
    pass_ends,
    spread,
)

MB = 1_000_000
EVEN = Sizes(100 * MB, (50 * MB,) * 20)
SLOW_DISK = Speed(1e9, 1e-3, 1e-5)

layer_bytes = st.integers(1, 64).map(lambda pages: 4096 * pages)
sizes = st.builds(Sizes, st.integers(0, 1 << 20), st.lists(layer_bytes, min_size=1, max_size=40).map(tuple))
speeds = st.builds(Speed, st.floats(1e5, 1e10), st.floats(0, 1e-2), st.floats(0, 1e-4))
rows = st.integers(1, 256)


@given(sizes, speeds, st.floats(0, 1.2), rows)
def test_a_plan_keeps_within_its_memory_and_promises_nothing_impossible(found, speed, share, count):
    memory = int(share * found.total)
    plan = choose(found, memory, speed, count)
    if plan is None:
        assert found.total > memory and found.least > memory
        reason = no_room(found, memory)
        assert reason is not None and str(found.least) in reason
        return
    assert plan.memory_bytes <= memory
    assert list(plan.streamed) == sorted(set(plan.streamed)) and all(0 <= i < len(found.layers) for i in plan.streamed)
    compute_s = speed.layer_seconds(count) * len(found.layers)
    together = plan.read_s + compute_s
    assert max(plan.read_s, compute_s) <= plan.pass_s(count) <= together * (1 + 1e-9)
    if plan.streamed:
        assert LEAST_RING <= plan.ring <= MOST_RING and found.total > memory
        assert plan.pass_bytes == sum(found.layers[i] for i in plan.streamed)


@given(sizes, speeds, st.floats(0, 1.2), rows)
def test_room_for_the_least_ring_is_enough(found, speed, share, count):
    memory = int(share * found.total)
    assert (choose(found, memory, speed, count) is None) == (
        found.total > memory and no_room(found, memory) is not None
    )


@given(sizes, speeds, st.floats(0, 1.2), st.floats(0, 1.2), rows)
def test_more_memory_never_makes_a_pass_slower_on_equal_layers(found, speed, one, other, count):
    even = Sizes(found.fixed, (found.layers[0],) * len(found.layers))
    plans = [choose(even, int(share * even.total), speed, count) for share in sorted((one, other))]
    if plans[0] is not None:
        assert plans[1] is not None
        assert plans[1].pass_s(count) <= plans[0].pass_s(count) * (1 + 1e-9) + 1e-12


def test_half_of_the_layers_are_read_while_the_others_compute():
    plan = choose(EVEN, 700 * MB, SLOW_DISK, 64)
    assert plan is not None and len(plan.streamed) == 20 - (700 - 100) // 50 + plan.ring
    assert plan.pass_bytes == len(plan.streamed) * 50 * MB and plan.memory_bytes == 700 * MB
    assert plan.pass_s(1) == pytest.approx(plan.read_s, rel=0.05)  # bound by the disk


def test_everything_stays_where_it_fits():
    plan = choose(EVEN, EVEN.total, SLOW_DISK, 64)
    assert plan is not None and plan.streamed == () and plan.ring == 0 and plan.fill_rows == 0
    assert plan.pass_s(10) == pytest.approx(20 * SLOW_DISK.layer_seconds(10))


def test_a_refusal_has_the_arithmetic():
    reason = no_room(EVEN, 199 * MB)
    assert reason is not None
    for part in ("--weight-memory-bytes 199000000", "100000000 bytes", "50000000 bytes", "give 200000000"):
        assert part in reason
    assert no_room(EVEN, 200 * MB) is None


def test_rows_that_fill_a_pass():
    plan = choose(EVEN, 700 * MB, SLOW_DISK, 64)
    assert plan is not None
    compute_s = [20 * SLOW_DISK.layer_seconds(count) for count in (plan.fill_rows - 1, plan.fill_rows)]
    assert compute_s[0] < plan.read_s <= compute_s[1]
    assert plan.pass_s(plan.fill_rows) < 1.2 * plan.read_s
    free = Plan(plan.sizes, Speed(1e9, 0.0, 0.0), plan.streamed, plan.ring)
    assert free.fill_rows == MOST_ROWS
    fast = Plan(plan.sizes, Speed(1e15, 1e-3, 1e-5), plan.streamed, plan.ring)
    assert fast.fill_rows == 0


@pytest.mark.parametrize("ring", [2, 3])
def test_passes_of_a_ring_by_hand(ring):
    """Four layers, all read, each in 2 s, computed in 1 s: the disk never waits, and the last layer is computed 1 s
    after it was read."""
    assert pass_ends(4, 1.0, dict.fromkeys(range(4), 2.0), ring, 3) == [9.0, 17.0, 25.0]
    # Computed in 3 s: only the first layer waits for the disk.
    assert pass_ends(4, 3.0, dict.fromkeys(range(4), 2.0), ring, 2) == [14.0, 26.0]


def test_a_ring_of_one_would_take_turns():
    assert pass_ends(4, 1.0, dict.fromkeys(range(4), 2.0), 1, 2) == [12.0, 24.0]


@given(st.integers(1, 200), st.data())
def test_layers_that_are_read_lie_evenly(layers, data):
    count = data.draw(st.integers(1, layers))
    found = spread(layers, count)
    assert len(set(found)) == count and found[0] >= 0 and found[-1] < layers
    gaps = {b - a for a, b in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_log_says_what_and_why():
    plan = choose(EVEN, 700 * MB, SLOW_DISK, 64)
    assert plan is not None
    text = described(plan, 700 * MB, 64)
    for part in ("1.1 GB", "700 MB", f"{len(plan.streamed)} are read", "1.00 GB/s", f"{plan.ring} buffers"):
        assert part in text


@settings(max_examples=50)
@given(st.integers(0, 500), st.integers(0, 64), st.integers(1, 400))
def test_steps_are_filled_up_to_the_time_of_a_pass(fill, decodes, chunk):
    load = StepLoad(1024 - decodes, decodes, 100 * decodes, 0)
    filled = FilledSteps(MixedChunks(chunk), fill).prefill_tokens(load)
    assert filled == max(chunk, fill - decodes)
    assert FilledSteps(DecodeFirst(), fill).prefill_tokens(load) >= load.budget


def test_a_policy_whose_decodes_wait_still_makes_them_wait():
    assert FilledSteps(PrefillFirst(), 3).decodes_wait and not FilledSteps(DecodeFirst(), 3).decodes_wait


def test_forecasts_of_many_passes_do_not_depend_on_the_first():
    plan = choose(EVEN, 300 * MB, SLOW_DISK, 1)
    assert plan is not None
    reads = {layer: EVEN.layers[layer] / SLOW_DISK.read_bytes_s for layer in plan.streamed}
    ends = pass_ends(20, SLOW_DISK.layer_seconds(1), reads, plan.ring, 40)
    assert (ends[-1] - ends[19]) / 20 == pytest.approx(plan.pass_s(1), rel=1e-6)
