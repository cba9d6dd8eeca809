"""The rule that divides cold blocks: moved into DRAM, streamed from SSD, or left on other nodes and asked about."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sched.beyond import ColdSteps, Room, forecast, no_room
from sched.elsewhere import Holder, Job, Own, Split, deadline_s, divide, room_with, with_asks

JOB = Job(need=100, prompt=1600, output=200, chunk_tokens=256, layers=10, block_bytes=1000, row_bytes=100)
OWN = Own(near_blocks=1000, far_blocks=0, near_s=1e-4, far_s=1e-3)
HOLDER = Holder("h", blocks=1000, ask_s=1e-4, bytes_per_s=1e7, link_bytes_per_s=1e9)  # a block: 1e-4 s, as our own

HOLDERS = st.lists(
    st.builds(
        Holder,
        st.sampled_from("abcdef"),
        st.integers(0, 60),
        st.floats(1e-5, 1e-2),
        st.floats(1e5, 1e9),
        st.floats(1e5, 1e10),
    ),
    max_size=3,
    unique_by=lambda one: one.node,
)
OWNS = st.builds(Own, st.integers(0, 60), st.integers(0, 60), st.floats(1e-6, 1e-2), st.floats(1e-5, 1e-1))


def test_equal_memories_halve_the_reads_less_the_round_trips():
    found = divide(JOB, OWN, [HOLDER])
    assert found is not None and found.far == 0
    # 10 round trips take as long as 10 blocks: 55 here, 45 there
    assert (found.near, found.held) == (55, (("h", 45),))
    assert found.ask_s == pytest.approx(OWN.token_s(55)) == pytest.approx(5.5e-3)


def test_a_long_round_trip_is_not_worth_it():
    assert divide(JOB, OWN, [replace(HOLDER, ask_s=2e-3)]) == Split(100, (), 0)


def test_a_slow_way_for_blocks_is_worth_it_only_for_a_long_answer():
    thin = replace(HOLDER, link_bytes_per_s=1e6)  # 45 blocks and the queries take 1.6 s, each token gains 4.5 ms
    assert divide(replace(JOB, output=50), OWN, [thin]) == Split(100, (), 0)
    found = divide(replace(JOB, output=1000), OWN, [thin])
    assert found is not None and found.num_held == 45


def test_what_does_not_fit_into_dram_is_asked_rather_than_streamed_if_that_is_faster():
    small = replace(OWN, near_blocks=40, far_blocks=1000)
    found = divide(JOB, small, [HOLDER])
    assert found is not None and found.near == 40 and 0 < found.far < 5 and found.num_held > 55
    far_is_fast = replace(small, far_s=1e-5)
    assert divide(JOB, far_is_fast, [replace(HOLDER, ask_s=1e-3)]) == Split(40, (), 60)


def test_what_is_here_already_stays():
    found = divide(replace(JOB, known=90), OWN, [HOLDER])
    assert found is None or found.near >= 90


def test_always_leaves_as_much_as_others_lend():
    assert divide(JOB, OWN, [replace(HOLDER, ask_s=1.0, blocks=80)], always=True).held == (("h", 80),)
    both = divide(JOB, OWN, [HOLDER, replace(HOLDER, node="i")], always=True)
    assert both is not None and both.num_held == 100 and both.near == 0
    assert sorted(blocks for _, blocks in both.held) == [50, 50]


@given(st.integers(0, 150), OWNS, HOLDERS, st.booleans(), st.integers(1, 500), st.integers(0, 60))
def test_every_block_has_a_place_within_its_room_and_nothing_is_refused_that_fits(
    need, own, holders, always, output, known
):
    job = replace(JOB, need=need, output=output, known=known)
    found = divide(job, own, holders, always=always)
    room = own.near_blocks + own.far_blocks + sum(one.blocks for one in holders)
    assert (found is None) == (need > room)
    if found is None:
        return
    lent = {one.node: one.blocks for one in holders}
    assert found.near + found.num_held + found.far == need
    assert 0 <= found.near <= own.near_blocks and 0 <= found.far <= own.far_blocks
    assert all(0 < blocks <= lent[node] for node, blocks in found.held)
    assert found.near == own.near_blocks or not found.far, "DRAM before SSD"
    if not always:
        assert found.near >= min(known, need, own.near_blocks)


@given(st.integers(1, 500), st.floats(1e-6, 30.0), st.floats(1e6, 1e12))
@example(500, 0.1, 1e12)
def test_a_busy_holder_of_quick_blocks_takes_all_that_it_lends(lent, ask_s, bytes_per_s):
    """A way of seconds next to blocks of nanoseconds: the request of a test waited for its timeout."""
    holder = replace(HOLDER, blocks=lent, ask_s=ask_s, bytes_per_s=bytes_per_s)
    found = divide(replace(JOB, need=lent), OWN, [holder], always=True)
    assert found is not None and found.held == (("h", lent),)


@given(st.integers(0, 60), OWNS, HOLDERS.filter(lambda some: len(some) == 1), st.integers(1, 500))
def test_no_other_division_is_much_faster(need, own, holders, output):
    """Against every number of blocks on one holder: with it, a token takes at most two blocks longer than at best;
    and it is only used if that makes the answer shorter."""
    job, (holder,) = replace(JOB, need=need, output=output), holders
    found = divide(job, own, holders)
    if found is None:
        return
    chunks = -(-job.prompt // job.chunk_tokens)

    def seconds(held: int) -> float:
        ask = (held * job.block_bytes + job.prompt * job.layers * job.row_bytes) / holder.link_bytes_per_s
        ask += chunks * job.layers * holder.ask_s
        return output * max(own.token_s(need - held), holder.token_s(held, job)) + (ask if held else 0.0)

    most = own.near_blocks + own.far_blocks
    fits = [held for held in range(need + 1) if held <= holder.blocks and need - held <= most]
    step = max(own.near_s, own.far_s, job.block_bytes / holder.bytes_per_s)
    quickest = min(max(own.token_s(need - held), holder.token_s(held, job)) for held in fits)
    token_s = max(own.token_s(need - found.num_held), holder.token_s(found.num_held, job))
    if found.held:
        assert token_s <= quickest + 2 * step + 1e-9
    if 0 in fits:
        assert seconds(found.num_held) <= seconds(0) + 1e-9


def test_the_forecast_counts_the_longer_of_reads_and_asks():
    room = Room(16, 1000, hot_blocks=4, window_blocks=0, near_blocks=100)
    steps, split = ColdSteps(0.01, 1e6, 1e5), Split(20, (("h", 30),), 0, ask_s=0.05, prompt_s=0.5)
    wider = room_with(room, split)
    assert wider.cold_blocks == 50 and wider.bytes_of(54 * 16) == (20_000, 0)
    alone = forecast(54 * 16, 0, 0, wider, steps, 1.0)
    found = with_asks(alone, split, steps.read_s(alone.near_bytes, alone.far_bytes))
    assert alone.token_s == pytest.approx(0.034) and found.token_s == pytest.approx(0.064)  # 4 ms of hot blocks
    assert found.prompt_s == pytest.approx(alone.prompt_s + 0.5)
    quick = with_asks(alone, replace(split, ask_s=0.001), steps.read_s(alone.near_bytes, alone.far_bytes))
    assert quick.token_s == pytest.approx(alone.token_s)


def test_a_refusal_counts_what_others_lend():
    room = Room(16, 1000, hot_blocks=4, window_blocks=0, near_blocks=6)
    assert no_room(150, 26, room, "d", lent=1) is None
    reason = no_room(150, 42, room, "d", lent=1)
    assert reason is not None and "need 8 blocks" in reason and "other nodes lend 1 (0.001 MB)" in reason


def test_a_deadline_grows_with_the_work():
    assert deadline_s(1, 0, 1e9) == 5.0
    for rows, nbytes in product((1, 64), (1 << 20, 1 << 30)):
        assert deadline_s(rows, nbytes, 1e9) == pytest.approx(5 + 4 * rows * nbytes / 1e9)
