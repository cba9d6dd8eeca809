"""Stages of long prompts in a batcher: they take turns with other prompts, and nothing names their blocks."""

from __future__ import annotations

import random
from math import inf

import pytest

from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.speculation.speculative import Speculator
from engine.step.part import MAX_UNREAD, Stage, Stripes
from engine.step.request import Request, RequestState
from engine.step.step import ScheduledRow, Step
from sched.batching import DynamicChunks, MixedChunks
from sched.cost import prefill_seconds
from sched.part_turns import SLICE_S
from tests.engine.core.test_batcher_states import Guesses
from tests.engine.toy_model import batcher, request, run_dry, run_step


def stage(begin: int, end: int, tokens: int = 40, name: str = "long", **more) -> Request:
    found = request(name, list(range(1, tokens + 1)), **more)
    found.part = Stage(begin, end, 4, 1000)
    found.handover = True
    return found


def test_a_stage_waits_until_all_agree_then_takes_planned_chunks():
    b = batcher(blocks=64, budget=16)
    r = stage(0, 2)
    b.add(0, r)
    assert b.schedule(0) is None
    b.begin_part(r, 0, [12, 16, 12])
    rows = []
    for now in range(3):
        step = b.schedule(now)
        assert step.has_parts and not any(row.samples or row.decodes for row in step.rows)
        rows += [(row.start, row.num_tokens) for row in step.rows]
        done = run_step(b, now, step)
        assert done.passed == [0] and not done.named and not done.emitted
    assert rows == [(0, 12), (12, 16), (28, 12)]
    assert r.finished and r.finish_reason == "passed" and not b.requests
    assert b.pool.usage()["free"] == 64, "blocks with some of the layers have no names"


def test_the_last_stage_computes_what_arrives_and_samples():
    b = batcher(blocks=64, budget=16)
    r = stage(2, 4)
    b.add(0, r)
    b.begin_part(r, 0)
    assert b.schedule(0) is None
    r.part.available = 20
    for _ in range(2):  # 16, then 4
        assert run_step(b, 1, b.schedule(1)).passed == []
    assert b.schedule(1) is None and r.state is RequestState.RUNNING
    r.part.available = 39
    while (step := b.schedule(2)) is not None:
        run_step(b, 2, step)
    r.part.available = 40  # one token is no decode
    step = b.schedule(3)
    assert [(row.num_tokens, row.samples, row.decodes) for row in step.rows] == [(1, True, False)]
    done = run_step(b, 3, step)
    assert [kept for _, _, kept in done.emitted] == [1] and r.finish_reason == "handover"
    assert b.pool.usage()["free"] == 64


def test_short_prompts_run_while_a_stage_waits_for_its_input():
    b = batcher(blocks=64, budget=16)
    r, short = stage(2, 4), request("short", [7] * 9, max_tokens=2)
    b.add(0, r)
    b.begin_part(r, 0)
    b.add(1, short)
    run_dry(b)
    assert short.finished and not r.finished
    r.part.available = 40
    run_dry(b)
    assert r.finished


def test_a_stage_runs_without_a_seat():
    """Two nodes with one seat each: stages of two groups would hold the seats that the other group waits for."""
    b = batcher(blocks=64, budget=16, seqs=1)
    first, second, short = stage(0, 2, name="first"), stage(2, 4, name="second"), request("short", [7] * 9)
    b.add(0, first)
    b.begin_part(first, 0, [20, 20])
    b.add(1, second)
    b.begin_part(second, 0)
    run_step(b, 2, b.schedule(2))
    first.part.unread = MAX_UNREAD  # the next stage of `first` waits until the group of `second` goes on
    assert b.schedule(3) is None and first.state is RequestState.RUNNING
    second.part.available = 40
    b.add(4, short)
    run_dry(b)
    assert second.finished and short.finished


def test_a_longer_prefix_than_agreed_is_cut():
    b = batcher(blocks=64, budget=64)
    run = request("before", list(range(1, 41)), max_tokens=1)
    b.add(0, run)
    run_dry(b)
    r = stage(0, 2)
    b.add(1, r)
    (loading,) = b.loads(1, 4)
    b.blocks.adopt_prefix(loading)
    b.loaded(1, loading)
    assert r.num_computed == 36
    b.begin_part(r, 24, [16])
    assert r.num_computed == 24 and len(r.block_ids) == 6
    step = b.schedule(1)
    assert [(row.start, row.num_tokens) for row in step.rows] == [(24, 16)]
    run_step(b, 1, step)
    assert b.pool.usage()["held"] == 0 and b.pool.usage()["cached"] == 10
    b.check_integrity()


@pytest.mark.parametrize("priority", ["interactive", "standard"])
def test_a_stage_loses_its_blocks_only_to_a_class_before_it(priority):
    b = batcher(blocks=12, budget=16, seqs=4)
    r = stage(0, 2)
    r.service_class = "batch" if priority == "interactive" else "standard"
    b.add(0, r)
    b.begin_part(r, 0, [16, 24])
    run_step(b, 0, b.schedule(0))
    assert len(r.block_ids) == 4
    r.part.unread = 9  # it stands still with its blocks
    other = request("other", list(range(100, 140)), max_tokens=1)
    other.service_class = priority
    b.add(1, other)
    step = b.schedule(1)
    if priority == "interactive":
        assert [lost for lost, _ in b.stuck()] == [r] and r.part.room(r.num_computed) == 0
        assert [row.request for row in step.rows] == [other]
        b.abort(1, r.request_id)
    else:
        assert not b.stuck() and len(r.block_ids) == 4 and step is None
        r.part.unread = 0
    run_dry(b)
    assert not b.requests
    b.check_integrity()


def waiting_with(b: Batcher, prefix: int, *requests: Request) -> None:
    """The requests wait with blocks for their first `prefix` tokens, which others computed before."""
    for number, r in enumerate(requests):
        b.add(0, request(f"before {number}", r.token_ids[:prefix], max_tokens=1))
    run_dry(b)
    for r in requests:
        b.add(1, r)
    for r in b.loads(1, 4):
        b.blocks.adopt_prefix(r)
        b.loaded(1, r)
        assert r.num_computed == prefix


def test_a_stage_that_waits_keeps_its_prefix_from_requests_behind_it():
    b = batcher(blocks=12, budget=16, seqs=4)
    r = stage(2, 4)
    waiting_with(b, 20, r)
    b.begin_part(r, 20)
    others = [request(f"other {n}", [100 * n] * 8, arrival=n, max_tokens=9) for n in (1, 2)]  # 4 blocks each, 7 left
    for other in others:
        b.add(2, other)
    run_dry(b)
    assert all(other.finished for other in others) and b.num_preemptions == 1
    assert not b.stuck() and len(r.block_ids) == 5
    r.part.available = 40
    run_dry(b)
    assert r.finish_reason == "handover"
    b.check_integrity()


def test_where_nothing_runs_a_stage_gives_its_prefix_last():
    b = batcher(blocks=12, budget=64, seqs=4)
    r, prompt = stage(2, 4, arrival=5), request("w", list(range(200, 224)), arrival=4, max_tokens=1)
    waiting_with(b, 20, r, prompt)
    b.begin_part(r, 20)
    first = request("first", [9] * 28, arrival=1, max_tokens=1)
    b.add(2, first)
    run_dry(b)
    assert first.finished and prompt.finished and not b.stuck() and len(r.block_ids) == 5
    whole = request("whole", [8] * 40, arrival=2, max_tokens=1)
    b.add(3, whole)
    step = b.schedule(3)
    assert [row.request for row in step.rows] == [whole] and b.stuck()[0][0] is r, "a node does not wait for others"


@pytest.mark.parametrize("name", ["a", "z"])
def test_a_prefix_goes_to_an_earlier_stage_with_input_while_others_decode(name):
    """The group of the prefix, which has computed nothing here, may wait on another node for the group of that stage.
    Only the later one of both ends."""
    b = batcher(blocks=16, budget=64, seqs=4)
    idle, comes = stage(2, 4, name="m"), stage(2, 4, name=name, arrival=1)
    waiting_with(b, 20, idle)
    decode = request("decode", [9] * 8, max_tokens=30)
    b.add(1, decode)
    run_step(b, 1, b.schedule(1))
    comes.token_ids = [7] * 40
    b.add(2, comes)
    b.begin_part(comes, 0)
    comes.part.available = 40
    step = b.schedule(2)
    assert [row.request for row in step.rows] == [decode]
    later, earlier = (idle, comes) if name == "a" else (comes, idle)
    assert [lost for lost, _ in b.stuck()] == [later] and bool(idle.block_ids) == (earlier is idle)
    run_step(b, 2, step)
    b.abort(3, later.request_id)
    if earlier is comes:
        run_dry(b)
        assert comes.finish_reason == "handover"
    b.check_integrity()


@pytest.mark.parametrize("name", ["a", "z"])
def test_one_of_two_groups_ends_where_both_have_begun_and_one_lacks_blocks(name):
    """The last in the order of ids, which all nodes know. The first waits."""
    b = batcher(blocks=12, budget=64, seqs=4)
    runs, comes = stage(0, 2, name="m"), stage(2, 4, name=name)
    comes.token_ids = [7] * 40
    for r in (runs, comes):
        b.add(0, r)
    b.begin_part(runs, 0, [16, 24])
    run_step(b, 1, b.schedule(1))
    runs.part.unread = MAX_UNREAD
    b.begin_part(comes, 0)
    comes.part.available = 16
    assert b.schedule(2) is None
    assert [(lost, "prompts of other nodes" in why) for lost, why in b.stuck()] == [(comes, True)] * (name == "z")
    if name == "z":
        b.abort(3, name)
    comes.part.available, runs.part.unread = 40, 0
    run_dry(b)
    assert runs.finish_reason == "passed" and comes.finished
    b.check_integrity()


def test_a_step_passes_as_many_layers_as_the_policy_has_time_for():
    """Eight tokens through the four layers of the model: more tokens pass fewer layers, and a chunk stays whole."""
    b = batcher(blocks=64, budget=64, policy=MixedChunks(8))
    r = stage(0, 3)
    b.add(0, r)
    b.begin_part(r, 0, [16, 10, 14])
    rows = []
    while (step := b.schedule(0)) is not None:
        rows += [(row.start, row.num_tokens, row.layers, row.ends) for row in step.rows]
        assert run_step(b, 0, step).passed == [0] * step.rows[0].ends
    assert rows == [
        (0, 16, range(2), False), (0, 16, range(2, 3), True),
        (16, 10, range(3), True),
        (26, 14, range(2), False), (26, 14, range(2, 3), True),
    ]  # fmt: skip
    assert r.finish_reason == "passed" and b.pool.usage()["free"] == 64


def test_nobody_waits_for_a_prefix_that_a_stage_computes():
    b = batcher(blocks=64, budget=16)
    r = stage(0, 2)
    b.add(0, r)
    b.begin_part(r, 0, [16, 24])
    run_step(b, 0, b.schedule(0))
    same = request("same", list(range(1, 41)), max_tokens=1)
    b.add(1, same)
    r.part.unread = 9
    run_dry(b)
    assert same.finished and not r.finished


@pytest.mark.parametrize("short_class", ["standard", "interactive", "batch"])
def test_a_stage_and_other_prompts_take_turns_and_classes_hold(short_class):
    b = batcher(blocks=64, budget=16)
    r = stage(0, 2)
    b.add(0, r)
    b.begin_part(r, 0, [8] * 5)
    run_step(b, 0, b.schedule(0))
    shorts = [request(f"short-{i}", [9 + i] * 12, max_tokens=1) for i in range(3)]
    for short in shorts:
        short.service_class = short_class
        b.add(1, short)
    ran, now = [], 1.0
    while (step := b.schedule(now)) is not None:
        assert len({row.request.part is None for row in step.rows}) == 1, "a step of both makes the short ones wait"
        ran.append(step.rows[0].request.request_id)
        now += 0.1
        run_step(b, now, step)
    turns = {
        "interactive": ["short-0", "short-1", "short-2", *["long"] * 4],
        "standard": ["short-0", "long", "short-1", "long", "short-2", "long", "long"],
        "batch": [*["long"] * 4, "short-0", "short-1", "short-2"],
    }
    assert ran == turns[short_class]
    assert not b.requests


def begun_stage(b: Batcher, layer: int, begin: int = 0, end: int = 3, **more) -> Request:
    """A stage whose first chunk has passed the layers before `layer`."""
    r = stage(begin, end, **more)
    b.add(0, r)
    b.begin_part(r, 0, [20, 20])
    cut(b, b.schedule(0.0), 0.1, layer)
    return r


def cut(b: Batcher, step: Step, now: float, layer: int) -> None:
    """The part in the step ends before that layer."""
    (row,) = (row for row in step.rows if row.request.part is not None)
    row.request.part.spent(0.1, f"before {layer}")
    row.stay(layer)
    assert not run_step(b, now, step).passed


def test_a_chunk_stays_whole_and_goes_on_behind_the_layers_that_it_has_passed():
    b = batcher(blocks=64, budget=32)
    r = begun_stage(b, 1)
    assert r.num_computed == 0 and len(r.block_ids) == 5 and r.part.hidden == "before 1"
    short = request("short", [7] * 12, max_tokens=2)
    b.add(1, short)
    step = b.schedule(1.0)
    assert [row.request for row in step.rows] == [short]
    run_step(b, 1.01, step)
    b.check_integrity()
    step = b.schedule(2.0)  # the part and the decode
    (row,) = (row for row in step.rows if row.request is r)
    assert (row.start, row.num_tokens, row.layers, row.spent_s) == (0, 20, range(1, 3), 0.1)
    cut(b, step, 2.1, 2)
    assert short.finished
    (row,) = b.schedule(3.0).rows
    assert (row.num_tokens, row.layers, row.spent_s) == (20, range(2, 3), 0.2)
    run_step(b, 3.1, Step([row]))
    assert r.num_computed == 20 and r.part.hidden is None and r.part.spent_s == 0
    run_dry(b)
    assert r.finish_reason == "passed" and b.pool.usage()["held"] == 0


def test_a_chunk_between_two_layers_goes_before_other_parts():
    """A part that waits in its step for another node relies on the parts there that have begun."""
    b = batcher(blocks=64, budget=32)
    r, urgent = begun_stage(b, 2), stage(0, 2, name="urgent", arrival=-1)
    urgent.service_class = "interactive"
    b.add(1, urgent)
    b.begin_part(urgent, 0, [40])
    for now, name, layers in ((1, "long", range(2, 3)), (2, "urgent", range(2)), (3, "urgent", range(2))):
        step = b.schedule(now)
        assert [(row.request.request_id, row.layers) for row in step.rows] == [(name, layers)], "one part in a step"
        run_step(b, now, step)
    assert urgent.finished and r.num_computed == 20


def test_a_begun_chunk_of_a_low_class_does_not_hold_up_a_part_of_a_high_one():
    """Other prompts between the two classes come all the time: the part goes before them, and so does that chunk."""
    b = batcher(blocks=64, budget=32)
    r, urgent = begun_stage(b, 2), stage(0, 2, name="urgent", arrival=-1)
    r.service_class, urgent.service_class = "batch", "interactive"
    b.add(1, urgent)
    b.begin_part(urgent, 0, [40])
    for now in range(1, 4):
        b.add(now, request(f"short {now}", [7 + now] * 12, max_tokens=1))
        run_step(b, now, step := b.schedule(now))
        assert [row.request for row in step.rows] == [r if now == 1 else urgent]
    assert urgent.finished


def test_a_hand_over_joins_the_next_step_of_a_part_that_is_owed_time():
    """It takes nothing from the part."""
    b = batcher(blocks=64, budget=32)
    r = begun_stage(b, 1)
    b.add(1, request("short", [7] * 12, max_tokens=1))
    run_step(b, 2.0, b.schedule(1.0))
    step = b.schedule(2.0)
    assert [row.request for row in step.rows] == [r] and b.lets_in_at() == inf
    later = request("later", [5] * 12, max_tokens=1)
    b.add(2.1, later)
    assert b.lets_in_at() == pytest.approx(3.0)
    pushed = request("pushed", [2] * 4, max_tokens=2)
    b.reserve(2.1, pushed)
    b.arrived(2.1, pushed, 3)
    assert b.lets_in_at() <= 2.1
    cut(b, step, 2.2, 2)
    assert {row.request for row in b.schedule(2.2).rows} == {r, pushed}


def next_to_a_stream(b: Batcher) -> Step:
    """The first step of a part with a chunk of 40 tokens, next to a request that decodes."""
    b.add(0, request("stream", [7] * 8, max_tokens=30))
    run_step(b, 0, b.schedule(0))
    r = stage(0, 4)
    b.add(0, r)
    b.begin_part(r, 0, [40])
    return b.schedule(1)


def test_streams_have_drafts_next_to_a_part():
    """Its chunk is large, but passes few layers in a step."""

    speculator = Speculator("ngram", 4, Guesses(random.Random(0)), "fixed", 1000, lambda rows, context: None)
    rules = BatchRules(policy=MixedChunks(8), speculator=speculator)
    b = Batcher(BlockPool(64), 4, 4, 64, 1000, {0}, rules)
    step = next_to_a_stream(b)
    assert {(row.request.request_id, row.num_drafts) for row in step.rows} == {("stream", 4), ("long", 0)}


def test_one_stream_costs_a_chunk_of_the_whole_budget_no_step():
    step = next_to_a_stream(batcher(blocks=64, budget=40))
    assert {(row.num_tokens, row.layers) for row in step.rows} == {(1, None), (40, range(4))}


def test_other_prompts_are_let_in():
    b = batcher(blocks=64, budget=32)
    r = begun_stage(b, 1)
    assert b.lets_in_at() == inf
    step = b.schedule(1.0)
    assert b.lets_in_at() == inf
    low = request("low", [7] * 12, max_tokens=1)
    low.service_class = "batch"
    b.add(1.1, low)
    assert b.lets_in_at() == inf, "its class waits"
    loading, short = request("loading", [9] * 12, max_tokens=1), request("short", [8] * 12, max_tokens=1)
    b.add(1.1, loading)
    b.loads(1.1, 4)
    assert loading.state is RequestState.LOADING and b.lets_in_at() == inf, "it could not run"
    b.add(1.2, short)
    assert b.lets_in_at() <= 1.2
    cut(b, step, 1.2, 2)
    run_step(b, 1.6, b.schedule(1.2))
    assert short.finished
    later = request("later", [5] * 12, max_tokens=1)
    b.add(1.6, later)
    step = b.schedule(1.6)
    assert [row.request for row in step.rows] == [r], "it is owed as long as the others took"
    assert b.lets_in_at() == pytest.approx(2.0)
    urgent = request("urgent", [4] * 12, max_tokens=1)
    urgent.service_class = "interactive"
    b.add(1.7, urgent)
    assert b.lets_in_at() <= 1.7
    run_step(b, 1.7, step)
    run_step(b, 1.8, step := b.schedule(1.7))
    assert {row.request for row in step.rows} == {urgent, later}


def test_who_lacks_blocks_is_looked_at_again_soon():
    b = batcher(blocks=12, budget=32)
    r, large = begun_stage(b, 1), request("large", [8] * 40, max_tokens=1)
    b.add(1, large)
    step = b.schedule(2.0)
    assert [row.request for row in step.rows] == [r] and b.lets_in_at() == 2.0 + SLICE_S
    small = request("small", [7] * 4, max_tokens=1)
    b.add(2.01, small)
    assert b.lets_in_at() == 2.0


def test_a_chunk_between_two_layers_loses_its_blocks_or_ends():
    for end in ("lost", "aborted", "aborted in a step", "failed"):
        b = batcher(blocks=12, budget=32)
        r = begun_stage(b, 1, name=end)
        r.service_class = "batch"
        if end == "lost":
            urgent = request("urgent", list(range(100, 144)), max_tokens=1)
            urgent.service_class = "interactive"
            b.add(1, urgent)
            step = b.schedule(1)
            assert [row.request for row in step.rows] == [urgent] and [lost for lost, _ in b.stuck()] == [r]
            assert not r.part.pending and r.part.hidden is None and not r.block_ids
            b.abort(1, end)
            run_step(b, 1, step)
        elif end == "aborted":
            b.abort(1, end)
        else:
            step = b.schedule(1)
            if end == "failed":
                b.fail(1, step)
            else:
                b.abort(1, end)
                assert len(r.block_ids) == 5, "the step writes into them"
                cut(b, step, 1, 2)
        assert r.finished and r.part.hidden is None and not r.part.pending
        run_dry(b)
        assert not b.requests and b.pool.usage()["held"] == 0
        b.check_integrity()


def test_next_to_decodes_a_chunk_passes_fewer_layers():
    model = StepCosts().mixed  # 1 ms per token
    b = batcher(blocks=600, budget=1000, policy=DynamicChunks(0.1, model))
    r = stage(0, 4, tokens=2000)
    b.add(0, r)
    b.begin_part(r, 0, [1000, 1000])
    b.add(0, request("stream", [7] * 12, max_tokens=30))
    run_step(b, 0, step := b.schedule(0))
    assert [row.num_tokens for row in step.rows] == [12]
    passed = []
    while not r.num_computed:
        step = b.schedule(1.0)
        assert [row.num_tokens for row in step.rows] == [1, 1000]
        passed.append(step.rows[1].layers)
        run_step(b, 1.1, step)
    assert passed == [range(layer, layer + 1) for layer in range(4)], "each more than a tenth of a second"


def test_a_node_learns_its_step_times_from_stages_too():
    """A stage takes its share of the work of a step, and the whole fixed time; so the model of whole steps fits."""
    costs, truth = StepCosts(), (0.004, 2e-4, 3e-8)
    for begin in (1, 2):
        for done in range(0, 4000, 400):
            r = stage(0, begin, tokens=4400)
            row = ScheduledRow(r, done, 400, samples=False)
            work_s = prefill_seconds(truth, 400, done) - truth[0]
            costs.observe(Step([row]), truth[0] + r.part.share * work_s)
    for tokens, context in ((400, 0), (200, 3000)):
        assert costs.prefill.estimate(tokens, context) == pytest.approx(
            prefill_seconds(truth, tokens, context), rel=0.1
        )


def stripes(index: int, tokens: int = 40, name: str = "long") -> Request:
    found = request(name, list(range(1, tokens + 1)))
    found.part = Stripes(0, 4, 4, 1000, index=index, nodes=2)
    found.handover = True
    return found


def test_a_node_skips_the_tokens_of_the_others():
    b = batcher(blocks=64, budget=16)
    r = stripes(1)
    b.add(0, r)
    b.begin_part(r, 0, [8, 8, 12, 12])
    assert b.schedule(0) is None, "the first chunk is another node's"
    rows = []
    for begin in (8, 28):
        b.skip_to(r, begin)
        step = b.schedule(1)
        rows += [(row.start, row.num_tokens, row.samples) for row in step.rows]
        assert not run_step(b, 1, step).named
    assert rows == [(8, 8, False), (28, 12, True)]
    assert r.finish_reason == "handover" and b.pool.usage()["free"] == 64


def test_a_node_without_the_last_chunk_passes():
    b = batcher(blocks=64, budget=16)
    r = stripes(0)
    b.add(0, r)
    b.begin_part(r, 0, [8, 8, 12, 12])
    run_step(b, 0, b.schedule(0))
    b.skip_to(r, 16)
    assert len(r.block_ids) == 2
    run_step(b, 1, b.schedule(1))
    assert r.finish_reason == "passed" and b.pool.usage()["free"] == 64
