"""The batcher against a toy model: every request ends with the tokens it would get alone, whatever runs with it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.core.batcher import Batcher, BatchRules
from engine.step.request import Request, RequestState
from sched.batching import MixedChunks, PrefillFirst
from sched.queueing import SRPT
from tests.engine.toy_model import EOS, alone, batcher, next_token, request, run_dry, run_step


def test_decodes_come_first_and_chunks_fill_the_budget():
    b = batcher(blocks=64, budget=16)
    a = request("a", [1] * 5, max_tokens=10)
    b.add(0, a)
    run_step(b, 0, b.schedule(0))
    long = request("long", [2] * 40)
    b.add(1, long)
    step = b.schedule(1)
    assert [(row.request.request_id, row.num_tokens, row.samples) for row in step.rows] == [
        ("a", 1, True),
        ("long", 12, False),  # 15 are left, 12 ends at a block border
    ]


def test_unaligned_budget_smaller_than_a_block_still_makes_progress():
    b = batcher(blocks=64, block_size=8, budget=3, seqs=2)
    r = request("a", list(range(1, 21)), max_tokens=2)
    b.add(0, r)
    run_dry(b)
    assert list(r.output_ids) == alone(list(range(1, 21)), 2)


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({}, EOS, "stop"),
        ({"ignore_eos": True}, EOS, None),
        ({"stop_token_ids": (7,)}, 7, "stop"),
        ({"max_tokens": 1}, 9, "length"),
        ({"min_tokens": 2}, EOS, None),
    ],
)
def test_why_a_request_ends(sampling, token, reason):
    b = batcher()
    r = request("a", [1, 2, 3], **sampling)
    b.add(0, r)
    b.commit(0, b.schedule(0), [(token,)])
    assert r.finish_reason == reason
    assert r.finished == (reason is not None)


def test_a_prompt_that_arrives_at_the_context_limit_ends_and_says_so():
    b = Batcher(BlockPool(16), 4, 4, 64, 10, {EOS})
    r, shorter = request("a", [1] * 9, max_tokens=50), request("b", [1] * 8, max_tokens=50)
    assert not b.decodes_on(r) and b.decodes_on(shorter) and b.decodes_on(request("c", [1] * 9, max_tokens=1))
    b.reserve(0.0, r)
    assert b.arrived(1.0, r, 33) == "length" and not b.requests and b.pool.usage()["held"] == 0
    b.reserve(1.0, shorter)
    assert b.arrived(2.0, shorter, 33) is None and [row.request for row in b.schedule(2.0).rows] == [shorter]


def test_the_context_of_a_prefill_node_ends_no_answer_of_a_decode_node():
    r = request("a", [1] * 9, max_tokens=50)
    r.handover = True
    r.token_ids.append(33)
    assert r.stop_reason({EOS}, 10) == "handover"


def test_context_limit_ends_with_length():
    b = batcher(max_len=6)
    r = request("a", [1, 2, 3, 4], max_tokens=100)
    b.add(0, r)
    run_dry(b)
    assert (r.finish_reason, r.num_tokens) == ("length", 6)


def test_abort_in_a_running_step_keeps_the_blocks_until_commit():
    b = batcher()
    r = request("a", [1, 2, 3])
    b.add(0, r)
    step = b.schedule(0)
    b.abort(0, "a")
    assert b.pool.usage()["held"] == 1
    assert b.commit(1, step, [(5,)]).emitted == []
    assert b.pool.usage()["held"] == 0
    assert not b.requests


def test_failed_step_ends_its_requests_and_frees_their_blocks():
    b = batcher()
    for name in "ab":
        b.add(0, request(name, [1, 2, 3]))
    step = b.schedule(0)
    b.abort(0, "a")
    assert [r.request_id for r in b.fail(0, step)] == ["b"]
    assert b.pool.usage()["held"] == 0
    assert b.schedule(1) is None


def test_reserved_request_decodes_after_its_kv_arrived():
    b = batcher()
    r = request("a", list(range(1, 11)), max_tokens=4)
    assert b.reserve(0, r) == 0
    assert b.schedule(0) is None
    first = alone(list(range(1, 11)), 1)[0]
    b.arrived(1, r, first)
    run_dry(b)
    assert list(r.output_ids) == alone(list(range(1, 11)), 4)
    again = request("b", list(range(1, 11)))
    assert b.reserve(2, again) == 2  # its full blocks were named on arrival
    b.abort(3, "b")
    assert b.pool.usage()["held"] == 0


def test_handover_ends_after_one_token():
    b = batcher()
    r = request("a", [1, 2, 3], max_tokens=10)
    r.handover = True
    b.add(0, r)
    b.commit(0, b.schedule(0), [(5,)])
    assert r.finish_reason == "handover"


def test_same_request_id_twice_is_refused():
    b = batcher()
    b.add(0, request("a", [1]))
    with pytest.raises(ValueError, match="already running"):
        b.add(0, request("a", [1]))


def test_a_short_prompt_passes_a_long_one_at_a_chunk_border():
    pool = BlockPool(64)
    b = Batcher(pool, 4, 4, 16, 1000, {EOS}, BatchRules(policy=MixedChunks(8), order=SRPT()))
    b.add(0, request("long", [2] * 40))
    run_step(b, 0, b.schedule(0))
    b.add(0.1, request("short", [3] * 8, arrival=0.1))
    assert [row.request.request_id for row in b.schedule(0.1).rows] == ["short"]


def test_prefill_first_lets_streams_wait_for_whole_prompts():
    b = Batcher(BlockPool(64), 4, 4, 16, 1000, {EOS}, BatchRules(policy=PrefillFirst()))
    b.add(0, request("stream", [1] * 4, max_tokens=9))
    run_step(b, 0, b.schedule(0))
    b.add(1, request("long", [2] * 40, arrival=1))
    steps = []
    for now in range(1, 5):
        step = b.schedule(now)
        steps.append([(row.request.request_id, row.num_tokens) for row in step.rows])
        run_step(b, now, step)
    assert steps == [[("long", 16)], [("long", 16)], [("long", 8)], [("stream", 1), ("long", 1)]]


def test_several_accepted_tokens_of_one_row_and_rejected_drafts_roll_back():
    """A row of 1 + 3 drafts that yields two tokens: KV of the two rejected positions does not count."""
    b = batcher(blocks=8, block_size=4)
    r = request("a", [1, 2, 3, 4, 5, 6], max_tokens=10)
    b.add(0, r)
    run_step(b, 0, b.schedule(0))  # 7 known, 6 computed
    step = b.schedule(1)
    b.blocks.extend(r, 4)
    step.rows[0].num_tokens = 4
    done = b.commit(1, step, [(21, 22)])
    assert done.emitted == [(r, 0, 2)]
    assert (r.num_tokens, r.num_computed, r.num_named) == (9, 8, 2)
    assert b.schedule(2).rows[0].start == 8


def test_tokens_after_the_end_are_dropped():
    b = batcher()
    r = request("a", [1, 2, 3], max_tokens=10)
    b.add(0, r)
    done = b.commit(0, b.schedule(0), [(21, EOS, 22)])
    assert done.emitted == [(r, 0, 2)]
    assert (list(r.output_ids), r.finish_reason) == ([21, EOS], "stop")
    assert b.pool.usage()["held"] == 0


def test_reserving_a_known_id_takes_no_blocks():
    b = batcher()
    b.add(0, request("a", [1]))
    with pytest.raises(ValueError, match="already running"):
        b.reserve(0, request("a", [1] * 8))
    assert b.pool.usage()["held"] == 0


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_load_with_aborts(seed: int):
    """Arrivals, shared prefixes, loads, remote reservations, aborts at any moment, few blocks."""
    rng = random.Random(seed)
    size, budget = rng.choice([2, 4]), rng.choice([3, 8, 32])
    b = batcher(rng.randint(10, 24), size, rng.randint(1, min(5, budget)), budget, 10 * size, rng.random() < 0.8)
    prefixes = [[rng.randint(1, 9) for _ in range(3 * size)] for _ in range(3)]
    live: dict[str, tuple[Request, list[int]]] = {}
    remote: list[tuple[Request, list[int]]] = []  # with the blocks that a transfer writes to
    aborted: set[str] = set()
    for now in range(400):
        if now < 60 and rng.random() < 0.5:
            prompt = rng.choice(prefixes)[: rng.randint(1, 3 * size)] + [rng.randint(1, 9)] * rng.randint(0, 3)
            r = request(str(now), prompt, arrival=now, max_tokens=rng.randint(1, 2 * size))
            try:
                if rng.random() < 0.3:
                    b.reserve(now, r)
                    b.pool.hold(r.block_ids)
                    remote.append((r, list(r.block_ids)))
                else:
                    b.add(now, r)
                live[r.request_id] = (r, prompt)
            except OutOfBlocks:
                pass
        loading = b.loads(now, 2)
        step = b.schedule(now)
        if rng.random() < 0.1 and live:
            victim = rng.choice(sorted(live))
            if b.abort(now, victim):
                aborted.add(victim)
        for r in loading:
            b.loaded(now, r)
        if step:
            assert step.num_tokens <= budget
            assert len(b.running) <= b.seats.max_num_seqs
            for row in step.rows:
                assert row.request.finished or len(row.request.block_ids) * size >= row.start + row.num_tokens
            run_step(b, now, step)
        if remote and (rng.random() < 0.5 or now >= 60):
            r, blocks = remote.pop(0)
            b.pool.unhold(blocks)
            if not r.finished:
                b.arrived(now, r, next_token(r.token_ids))
        b.check_integrity()
        if now > 60 and not b.requests and not remote:
            break
    assert b.pool.usage()["held"] == 0, f"seed {seed}"
    for name, (r, prompt) in live.items():
        assert r.state is RequestState.FINISHED, f"seed {seed}"
        if name not in aborted:
            assert list(r.output_ids) == alone(prompt, r.num_output_tokens), f"seed {seed}"
            assert r.num_output_tokens == r.sampling.max_tokens or r.num_tokens == b.max_model_len
