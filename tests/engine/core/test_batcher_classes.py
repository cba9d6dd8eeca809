"""Service classes on a node whose seats and blocks are taken: who overtakes whom, and that nobody starves by it."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.core.batcher import Batcher, BatchRules
from engine.speculation.speculative import Speculator
from engine.step.request import Request, RequestState
from sched.batching import BoundedSteps, DecodeFirst
from sched.classes import BATCH, CLASSES
from sched.part_turns import MOST_LOST_S, RECENT_S, SLICE_S
from sched.queueing import EDF, FCFS, OVERDUE_OBJECTIVES, queue_orders
from tests.engine.core.test_batcher_states import Guesses
from tests.engine.toy_model import alone, batcher, next_token, request, run_dry, run_step


def of(name: str, service_class: str, prompt: list[int], arrival: float, max_tokens: int) -> Request:
    made = request(name, prompt, arrival, max_tokens=max_tokens, ignore_eos=True)
    made.service_class = service_class
    return made


def hand_over(b, now: float, r: Request) -> Request:
    b.reserve(now, r)
    b.arrived(now, r, next_token(r.token_ids))
    return r


def full_of_batch(order, seats=4, streams=16):
    b = batcher(blocks=400, block_size=4, seqs=seats, budget=64, order=order)
    made = [hand_over(b, i / 100, of(f"b{i}", "batch", [i + 1] * 6, i / 100, 40)) for i in range(streams)]
    for step in range(5):
        run_step(b, 1 + step, b.schedule(1 + step))
    return b, made


def test_an_interactive_hand_over_takes_the_seat_of_a_batch_stream_and_gives_it_back():
    b, streams = full_of_batch(EDF())
    chat = hand_over(b, 10, of("chat", "interactive", [99] * 6, 10, 5))
    step = b.schedule(10)
    assert [row.request for row in step.rows] == [chat] and step.left_out == streams[:3], "three have their seats"
    (victim,) = [r for r in streams if r.paused]
    assert victim is streams[3], "the last of the running ones"
    blocks, computed = list(victim.block_ids), victim.num_computed
    run_step(b, 10, step)
    for now in range(11, 15):
        run_step(b, now, b.schedule(now))
    assert chat.finish_reason == "length"
    assert victim.state is RequestState.RUNNING, "before those that never ran"
    assert (victim.block_ids[: len(blocks)], victim.num_computed) == (blocks, computed + 1), "nothing is computed again"
    run_dry(b)
    for i, r in enumerate(streams):
        assert list(r.output_ids) == alone([i + 1] * 6, 40)
    assert b.pool.usage()["held"] == 0


def test_an_interactive_prompt_takes_the_seat_of_a_batch_stream():
    b, streams = full_of_batch(EDF())
    chat = of("chat", "interactive", [99] * 10, 10, 5)
    b.add(10, chat)
    b.loads(10, 4), b.loaded(10, chat)
    step = b.schedule(10)
    assert [row.num_tokens for row in step.rows if row.request is chat] == [10]
    assert sum(r.paused for r in streams) == 1


def test_first_come_first_served_lets_nobody_overtake():
    b, streams = full_of_batch(FCFS())
    hand_over(b, 10, of("chat", "interactive", [99] * 6, 10, 5))
    assert [row.request for row in b.schedule(10).rows] == streams[:4]


def test_who_has_waited_for_its_objective_is_not_overtaken_any_more():
    b, streams = full_of_batch(EDF())
    late = CLASSES["batch"].ttft_s + 10
    hand_over(b, late, of("chat", "interactive", [99] * 6, late, 5))
    assert [row.request for row in b.schedule(late).rows] == streams[:4]


def test_a_claim_gets_the_blocks_of_batch_streams_and_nobody_behind_it_does():
    b = batcher(blocks=16, block_size=4, seqs=4, budget=64, order=EDF())
    streams = [hand_over(b, 0, of(f"b{i}", "batch", [i + 1] * 15, i, 40)) for i in range(4)]
    run_step(b, 5, b.schedule(5))
    chat = of("chat", "interactive", [99] * 15, 10, 5)
    with pytest.raises(OutOfBlocks):
        b.reserve(10, chat)
    b.claim(chat)
    step = b.schedule(10)
    with pytest.raises(OutOfBlocks, match="is queued behind"):
        b.reserve(10, of("another", "batch", [98] * 3, 10, 5))
    b.reserve(10, chat)
    b.unclaim(chat)
    run_step(b, 10, step)
    b.arrived(10, chat, next_token(chat.token_ids))
    assert chat in [row.request for row in b.schedule(11).rows]
    assert streams[3].num_preemptions > 0 and not streams[0].num_preemptions


class Busy:
    """A decode node that is never idle: `outstanding` hand-overs of the highest class are always open, and more come as
    soon as some end."""

    def __init__(self, order: str, seats: int, blocks: int, dt: float, outstanding: int, lengths: list[int]) -> None:
        self.b = batcher(blocks=blocks, block_size=4, seqs=seats, budget=40, order=queue_orders[order]())
        self.dt, self.now, self.steps = dt, 0.0, 0
        self.outstanding, self.lengths = outstanding, lengths
        self.made: list[Request] = []
        self.stood = False

    def step(self) -> None:
        b, self.steps = self.b, self.steps + 1
        self.now += self.dt
        while sum(not r.finished for r in self.made) < self.outstanding:
            number = len(self.made)
            length = self.lengths[number % len(self.lengths)]
            self.made.append(of(f"i{number}", "interactive", [number % 50 + 1] * 7, self.now, length))
            b.claim(self.made[-1])
        for r in b.claims(self.now):
            try:
                b.reserve(self.now, r)
            except OutOfBlocks:
                break
            b.unclaim(r)
            b.arrived(self.now, r, next_token(r.token_ids))
        for r in b.loads(self.now, 4):
            b.loaded(self.now, r)
        step = b.schedule(self.now)
        assert step is not None or not self.stood, "a step without work makes room for a claim"
        self.stood = step is None
        if step is not None:
            run_step(b, self.now + self.dt / 2, step)


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from(list(queue_orders)),
    seats=st.integers(1, 4),
    blocks=st.integers(16, 30),
    outstanding=st.integers(1, 8),
    lengths=st.lists(st.integers(2, 10), min_size=1, max_size=4),
    lost_at=st.lists(st.integers(1, 30), max_size=3),
)
def test_a_request_of_the_lowest_class_gets_through_whatever_comes(order, seats, blocks, outstanding, lengths, lost_at):
    """`lost_at`: steps after which it loses its blocks, beyond other losses. Time passes 5 s a step, so that the
    bound of the order (its objective; with srpt ten times that; with weighted-fair its share) is a number of steps."""
    node = Busy(order, seats, blocks, 5.0, outstanding, lengths)
    batch = of("batch", "batch", [60] * 20, 0.0, 36)
    node.b.claim(batch)
    objective = CLASSES["batch"].ttft_s
    patience = {"fcfs": 0, "edf": objective, "srpt": OVERDUE_OBJECTIVES * objective, "weighted-fair": 13 * 56 * 5.0}[
        order
    ]
    ahead = 2 * outstanding * max(lengths)
    bound = patience / node.dt + ahead + 3 * (36 + 20)
    while not batch.finished:
        node.step()
        if node.steps in lost_at and batch.request_id in node.b.requests and batch.block_ids:
            node.b.seats.lose(node.now, batch)
        assert node.steps <= bound, (batch.num_output_tokens, batch.num_preemptions, len(node.made))
    assert list(batch.output_ids) == alone([60] * 20, 36)
    node.b.check_integrity()
    assert all(r.num_output_tokens == r.sampling.max_tokens for r in node.made if r.finished)


class Linear:
    """A step takes a millisecond per token."""

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        return 0.001 * decodes

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return 0.001 * tokens

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        return round(1000 * seconds) - decodes

    def largest_prefill(self, seconds: float, context: int) -> int:
        return round(1000 * seconds)


def test_while_others_come_prompts_of_class_batch_get_a_slice_of_a_step():
    """Who comes next waits for a slice, and not for the step that it is in itself. The order decides who goes first."""
    b = batcher(
        blocks=400, block_size=4, seqs=8, budget=400, order=EDF(), policy=BoundedSteps(DecodeFirst(), 1.0, Linear())
    )
    for i in range(20):
        b.add(0, of(f"b{i}", BATCH.name, [10 + i] * 60, 0.0, 1))

    def step(now: float) -> dict[str, int]:
        chosen = b.schedule(now)
        run_step(b, now, chosen)
        found: dict[str, int] = {}
        for row in chosen.rows:
            kind = row.request.service_class
            found[kind] = found.get(kind, 0) + row.num_tokens
        return found

    slice_tokens = 1000 * SLICE_S
    assert step(0.0)[BATCH.name] > 4 * slice_tokens, "nobody else is here"
    b.add(1, of("chat", "interactive", [99] * 20, 1.0, 1))
    mixed = step(1.0)
    assert mixed == {"interactive": 20}, "its first token waits for nothing of class batch"
    assert 0 < step(1.1)[BATCH.name] <= slice_tokens
    b.add(2, of("long", "standard", [98] * 300, 2.0, 1))
    assert step(2.0) == {"standard": 300}, "it gets the step whole, and batch nothing of it"
    assert step(2.0 + RECENT_S)[BATCH.name] > 4 * slice_tokens, "nobody came for a while"


def test_an_old_prompt_of_class_batch_in_front_takes_its_slice_and_not_the_step_of_the_others():
    b = batcher(blocks=400, block_size=4, budget=400, order=EDF(), policy=BoundedSteps(DecodeFirst(), 1.0, Linear()))
    old, now = of("old", BATCH.name, [7] * 800, 0.0, 1), 118.0
    b.add(now, old)
    std = of("std", "standard", [8] * 40, now, 1)
    late = of("late", "standard", [9] * 200, now, 1)
    b.add(now, std)
    b.add(now, late)
    chosen = b.schedule(now)
    rows = {row.request.request_id: row.num_tokens for row in chosen.rows}
    assert chosen.rows[0].request is old, "the order lets it go first"
    assert 0 < rows["old"] <= 1000 * SLICE_S and rows["std"] == 40 and rows["late"] == 200
    run_step(b, now, chosen)
    run_dry(b)
    assert all(r.finish_reason == "length" for r in (old, std, late))


def a_chat_was_here(b) -> None:
    """Only then do steps give way."""
    b.add(0, of("before", "interactive", [3] * 5, 0.0, 1))
    run_step(b, 0, b.schedule(0))


def test_a_step_of_class_batch_gives_way_to_who_comes_and_is_computed_again():
    b = batcher(blocks=400, block_size=4, seqs=8, budget=64, order=EDF())
    a_chat_was_here(b)
    streams = [of(f"b{i}", BATCH.name, [10 + i] * 50, 0.0, 3) for i in range(4)]
    for one in streams:
        b.add(0, one)
    first = b.schedule(0)
    assert first.gives_way and b.lets_in_at() == inf
    b.add(0, of("another", BATCH.name, [7] * 5, 0.0, 1))
    assert b.lets_in_at() == inf, "its class waits"
    chat = of("chat", "interactive", [99] * 6, 0.01, 2)
    b.add(0.01, chat)
    assert b.lets_in_at() <= 0.01
    b.abort(0.01, first.rows[0].request.request_id)
    b.gave_way(0.02, first)
    b.check_integrity()
    second = b.schedule(0.02)
    assert [row.request for row in second.rows] == [chat] and not second.gives_way and b.lets_in_at() == inf
    run_step(b, 0.03, second)
    run_dry(b)
    assert list(chat.output_ids) == alone([99] * 6, 2)
    ended = streams.index(first.rows[0].request)
    for i, one in enumerate(streams):
        assert list(one.output_ids) == ([] if i == ended else alone([10 + i] * 50, 3))
    assert b.pool.usage()["held"] == 0


def test_who_already_waited_when_the_step_was_chosen_does_not_end_it():
    """It could not run then."""
    b = batcher(blocks=400, block_size=4, seqs=1, budget=64, order=FCFS())
    a_chat_was_here(b)
    b.add(0, of("b", BATCH.name, [1] * 100, 0.0, 2))
    run_step(b, 0, b.schedule(0))
    b.add(1, of("chat", "interactive", [9] * 6, 1.0, 2))
    step = b.schedule(1)
    assert step.gives_way and b.lets_in_at() == inf, "there is one seat"
    b.add(1, of("other", "interactive", [8] * 6, 1.0, 2))
    assert b.lets_in_at() <= 1
    run_step(b, 1, step)
    run_dry(b)


def test_decodes_of_class_batch_give_way_to_a_hand_over():
    b, streams = full_of_batch(EDF(), seats=6, streams=4)
    step = b.schedule(10)
    assert all(row.decodes for row in step.rows) and len(step.rows) == 4
    assert step.gives_way and b.lets_in_at() == inf
    chat = hand_over(b, 10, of("chat", "interactive", [99] * 6, 10, 3))
    assert b.lets_in_at() == 0.0
    b.gave_way(10.01, step)
    b.check_integrity()
    nxt = b.schedule(10.01)
    assert [row.request for row in nxt.rows] == [chat] and nxt.left_out == streams
    run_step(b, 10.02, nxt)
    run_dry(b)
    assert list(chat.output_ids) == alone([99] * 6, 3)
    for i, one in enumerate(streams):
        assert list(one.output_ids) == alone([i + 1] * 6, 40), "nothing of the step that ended remains"
    assert b.pool.usage()["held"] == 0


def test_decodes_of_class_batch_are_left_out_of_the_steps_of_chats_until_it_has_lost_enough():
    b, streams = full_of_batch(EDF(), seats=6, streams=4)
    chat = hand_over(b, 10, of("chat", "interactive", [99] * 6, 10, 40))
    now, alone_for = 10.0, 0.0
    while (step := b.schedule(now)).left_out:
        assert [row.request for row in step.rows] == [chat] and set(step.left_out) == set(streams)
        run_step(b, now + 0.03, step)
        now, alone_for = now + 0.03, alone_for + 0.03
    assert MOST_LOST_S <= alone_for + 1e-9 <= MOST_LOST_S + 0.03
    assert {row.request for row in step.rows} == {chat, *streams}, "as many of both as there are"
    run_step(b, now, step)
    run_dry(b)
    assert list(chat.output_ids) == alone([99] * 6, 40)
    assert all(list(one.output_ids) == alone([i + 1] * 6, 40) for i, one in enumerate(streams))


def test_first_come_first_served_leaves_nobody_out_who_came_first():
    b = batcher(blocks=400, block_size=4, seqs=8, budget=64, order=FCFS())
    streams = [hand_over(b, i, of(f"b{i}", "batch", [i + 1] * 6, i, 40)) for i in (0, 2)]
    chat = hand_over(b, 1, of("chat", "interactive", [99] * 6, 1, 40))
    step = b.schedule(3)
    assert [row.request for row in step.rows] == [streams[0], chat] and step.left_out == [streams[1]]


def test_prompts_of_class_batch_keep_their_place_in_the_order_next_to_decodes():
    """The order of prompts is what --queue-order says, and their slice bounds how long a chat waits."""
    b = batcher(blocks=400, block_size=4, seqs=8, budget=64, order=EDF())
    chat = hand_over(b, 0, of("chat", "interactive", [99] * 6, 0, 4))
    late = of("late", BATCH.name, [7] * 20, 0.0, 2)
    b.add(0, late)
    step = b.schedule(0)
    assert [row.request for row in step.rows] == [chat, late] and not step.left_out
    run_step(b, 0, step)
    run_dry(b)
    assert list(late.output_ids) == alone([7] * 20, 2) and list(chat.output_ids) == alone([99] * 6, 4)


def test_prompts_that_cannot_run_lose_nothing():
    """Only what would have run is left out, and counts to what class batch may lose."""
    b = batcher(blocks=400, block_size=4, seqs=1, budget=64, order=EDF())
    b.add(0, of("waits", BATCH.name, [7] * 20, 0.0, 2))
    for now in range(3):
        b.add(now, of(f"chat{now}", "interactive", [20 + now] * 5, now, 1))
        step = b.schedule(now)
        assert [row.request.request_id for row in step.rows] == [f"chat{now}"] and not step.left_out
        run_step(b, now + 0.5, step)
    run_dry(b)


def test_a_step_that_verifies_drafts_does_not_give_way():
    """They would be proposed once more."""
    speculator = Speculator("ngram", 3, Guesses(random.Random(0)), "fixed", 1000, lambda rows, context: None)
    b = Batcher(BlockPool(64), 4, 4, 64, 1000, {0}, BatchRules(order=EDF(), speculator=speculator))
    hand_over(b, 0, of("b", BATCH.name, [1, 2, 3] * 8, 0.0, 20))
    step = b.schedule(0)
    assert [row.num_drafts for row in step.rows] == [3] and not step.gives_way


def test_chats_in_every_step_do_not_keep_class_batch_out():
    """It gets what they leave, as soon as it has lost enough."""
    b, now = batcher(blocks=400, block_size=4, seqs=8, budget=64, order=EDF()), 0.0
    long = of("long", BATCH.name, [7] * 600, 0.0, 1)
    b.add(now, long)
    for i in range(20):
        b.add(now, of(f"c{i}", "interactive", [20 + i] * 5, now, 1))
        run_step(b, now + 0.1, b.schedule(now))
        now += 0.1
    assert long.finish_reason == "length"


def test_a_step_that_computes_what_a_chat_waits_for_does_not_give_way():
    b = batcher(blocks=400, block_size=4, seqs=8, budget=20, order=EDF())
    a_chat_was_here(b)
    shared = [7] * 60
    b.add(0, of("b", BATCH.name, shared, 0.0, 1))
    first = b.schedule(0)
    assert first.gives_way
    run_step(b, 0, first)
    b.add(0, of("chat", "interactive", [*shared, 1], 0.0, 1))
    step = b.schedule(0)
    assert [row.request.request_id for row in step.rows] == ["b"], "a chat waits for these blocks"
    assert not step.gives_way and b.lets_in_at() == inf
    run_step(b, 0, step)
    run_dry(b)


class PerPrompt(DecodeFirst):
    """The more prompts wait, the longer a step may be."""

    def prefill_tokens(self, load):
        return 12 * len(load.prompts)


def test_prompts_of_class_batch_alone_are_all_counted():
    b = batcher(blocks=400, block_size=4, budget=400, order=EDF(), policy=PerPrompt())
    stream = hand_over(b, 0, of("stream", BATCH.name, [1] * 6, 0.0, 40))
    run_step(b, 0, b.schedule(0))
    for i in range(3):
        b.add(1, of(f"b{i}", BATCH.name, [10 + i] * 100, 1.0, 1))
    chosen = b.schedule(1)
    assert chosen.rows[0].request is stream and chosen.num_tokens == 1 + 36
