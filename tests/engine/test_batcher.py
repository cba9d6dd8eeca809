"""The batcher against a toy model: every request ends with the tokens it would get alone, whatever runs beside it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.block import BlockGeometry, root_key
from cache.pool import BlockPool, OutOfBlocks
from engine.batcher import Batcher
from engine.request import Request, RequestState, SamplingParams
from engine.step import Step
from sched.batching import MixedChunks, PrefillFirst
from sched.queueing import SRPT

ROOT = root_key("toy", BlockGeometry(1, 1, 2, 4, "float32"))
EOS = 0


def batcher(blocks=16, block_size=4, seqs=4, budget=16, max_len=1000, caching=True) -> Batcher:
    return Batcher(BlockPool(blocks), block_size, seqs, budget, max_len, {EOS}, caching)


def request(name: str, prompt: list[int], arrival=0.0, **sampling) -> Request:
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return Request(name, list(prompt), len(prompt), params, arrival, ROOT)


def next_token(tokens: list[int]) -> int:
    """The toy model: depends on the whole context, never EOS."""
    return 1 + (sum(tokens) * 31 + len(tokens)) % 50


def run_step(b: Batcher, now: float, step: Step):
    sampled = [(next_token(row.request.token_ids),) if row.samples else None for row in step.rows]
    return b.commit(now, step, sampled)


def run_dry(b: Batcher, limit=500) -> None:
    for now in range(limit):
        for r in b.loads(now, 4):
            b.loaded(now, r)
        step = b.schedule(now)
        if step is None:
            return
        run_step(b, now, step)
    raise AssertionError(f"not dry after {limit} steps: {b.requests}")


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


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


def test_prefix_is_reused_but_never_the_last_token():
    b = batcher()
    first = request("first", list(range(1, 9)), max_tokens=1)
    b.add(0, first)
    run_dry(b)
    again = request("again", list(range(1, 9)), max_tokens=1)
    b.add(1, again)
    step = b.schedule(1)
    assert again.num_cached == 4  # 8 tokens = 2 full blocks, but one token must be computed
    assert step.rows[0].num_tokens == 4
    b.commit(1, step, [(5,)])
    b.check_integrity()


def test_prefix_caching_off_reuses_nothing():
    b = batcher(caching=False)
    for name in ("first", "again"):
        r = request(name, list(range(1, 13)), max_tokens=1)
        b.add(0, r)
        run_dry(b)
        assert r.num_cached == 0
    assert b.pool.usage()["cached"] == 0


def test_preempted_request_resumes_and_keeps_its_tokens():
    b = batcher(blocks=6, block_size=4, seqs=4, budget=64)
    requests = [request(str(i), [i + 1] * 8, arrival=i, max_tokens=12, ignore_eos=True) for i in range(3)]
    for r in requests:
        b.add(r.arrival, r)
    run_dry(b)
    assert b.num_preemptions > 0
    for i, r in enumerate(requests):
        assert list(r.output_ids) == alone([i + 1] * 8, 12)
    assert b.pool.usage()["held"] == 0
    b.check_integrity()


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


def test_reservation_without_room_has_no_side_effects():
    b = batcher(blocks=2)
    b.add(0, request("a", [1] * 4, max_tokens=4))
    b.schedule(0)
    before = b.pool.usage()
    with pytest.raises(OutOfBlocks):
        b.reserve(0, request("big", [2] * 12))
    assert b.pool.usage() == before
    assert "big" not in b.requests


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


def test_the_newest_of_the_lowest_class_gives_its_blocks_back():
    b = batcher(blocks=9, block_size=4, seqs=4, budget=64)
    names = {"old batch": "batch", "new batch": "batch", "chat": "interactive"}
    requests = {}
    for arrival, (name, service_class) in enumerate(names.items()):
        r = request(name, [arrival + 1] * 8, arrival=arrival, max_tokens=9, ignore_eos=True)
        r.service_class = service_class
        requests[name] = r
        b.add(arrival, r)
    run_dry(b)
    assert [r.num_preemptions > 0 for r in requests.values()] == [False, True, False]
    for i, r in enumerate(requests.values()):
        assert list(r.output_ids) == alone([i + 1] * 8, 9)


def test_prefixes_of_waiting_requests_go_before_a_running_request_does():
    b = batcher(blocks=6, block_size=4, seqs=2, budget=64)
    prefix = list(range(1, 9))
    b.add(0, request("first", prefix, max_tokens=1))
    run_dry(b)  # two blocks of `prefix` are cached
    stream = request("stream", [30] * 7, arrival=1, max_tokens=12, ignore_eos=True)
    b.add(1, stream)
    run_step(b, 1, b.schedule(1))
    waits = request("waits", prefix + [9] * 12, arrival=2, max_tokens=1)
    b.add(2, waits)
    run_step(b, 2, b.schedule(2))
    assert len(waits.block_ids) == 2  # it sits on its prefix, and the rest does not fit
    run_dry(b)
    assert (b.num_preemptions, stream.finish_reason, waits.finish_reason) == (0, "length", "length")


def test_a_short_prompt_passes_a_long_one_at_a_chunk_border():
    pool = BlockPool(64)
    b = Batcher(pool, 4, 4, 16, 1000, {EOS}, policy=MixedChunks(8), order=SRPT())
    b.add(0, request("long", [2] * 40))
    run_step(b, 0, b.schedule(0))
    b.add(0.1, request("short", [3] * 8, arrival=0.1))
    assert [row.request.request_id for row in b.schedule(0.1).rows] == ["short"]


def test_prefill_first_lets_streams_wait_for_whole_prompts():
    b = Batcher(BlockPool(64), 4, 4, 16, 1000, {EOS}, policy=PrefillFirst())
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


def test_the_last_running_prompt_gives_way_to_handed_over_requests_in_the_same_step():
    """It cannot grow, since the blocks are those of requests that wait for its seat: no step may be skipped for it."""
    b = batcher(blocks=8, block_size=2, seqs=1, budget=8)
    long = request("long", [1] * 12, max_tokens=1)
    b.add(0, long)
    run_step(b, 0, b.schedule(0))
    pushed = [request(name, [2] * 4, arrival=1.0, max_tokens=2) for name in ("x", "y")]
    for each in pushed:
        b.reserve(1, each)
        b.arrived(1, each, 3)
    step = b.schedule(2)
    assert step is not None and [row.request for row in step.rows] == [pushed[0]]
    run_step(b, 2, step)
    run_dry(b)
    assert long.output_ids and b.pool.usage()["held"] == 0


def computed_tokens(b: Batcher, limit=200) -> int:
    """Run dry; tokens of all steps."""
    count = 0
    for now in range(limit):
        for r in b.loads(now, 4):
            b.loaded(now, r)
        step = b.schedule(now)
        if step is None:
            return count
        count += sum(row.num_tokens for row in step.rows)
        run_step(b, now, step)
    raise AssertionError("not dry")


def test_a_burst_of_one_prompt_is_computed_once():
    b = batcher(blocks=64, budget=64, seqs=8)
    prompts = [[*range(1, 25), 30 + i] for i in range(4)]  # 6 blocks in common, then one token each
    requests = [request(str(i), prompt, max_tokens=2) for i, prompt in enumerate(prompts)]
    for r in requests:
        b.add(0, r)
    first = b.schedule(0)
    assert [row.request.request_id for row in first.rows] == ["0"], "the others wait for its blocks"
    run_step(b, 0, first)
    assert computed_tokens(b) == 3 * 1 + 4, "a token of each prompt, and each one's second output"
    for r, prompt in zip(requests, prompts, strict=True):
        assert list(r.output_ids) == alone(prompt, 2)
    b.check_integrity()


def test_who_shares_nothing_more_does_not_wait():
    b = batcher(blocks=64, budget=64, seqs=8)
    b.add(0, request("a", list(range(1, 25))))
    b.add(0, request("b", [*range(1, 9), *range(40, 56)]))  # its first two blocks are a's
    b.add(0, request("c", list(range(60, 76))))
    assert [row.request.request_id for row in b.schedule(0).rows] == ["a", "c"]


def test_a_waiting_request_takes_what_joined_its_prefix():
    b = batcher(blocks=64, budget=16, seqs=1)
    b.add(0, request("first", list(range(1, 9)), max_tokens=1))
    run_dry(b)
    long, again = list(range(1, 33)), request("again", [*range(1, 33), 40], max_tokens=1)
    b.add(1, request("long", long, max_tokens=1))
    b.add(1, again)
    for r in b.loads(1, 4):
        b.blocks.adopt_prefix(r)  # what was there when they came: two blocks
        b.loaded(1, r)
    assert len(again.block_ids) == 2
    run_dry(b)
    assert again.num_cached == 32 and list(again.output_ids) == alone([*range(1, 33), 40], 1)
    b.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=8
    ),
    st.integers(3, 40),
    st.integers(1, 4),
)
def test_sharing_what_is_being_computed_changes_no_token(shapes, budget, seqs):
    b = batcher(blocks=64, budget=budget, seqs=seqs)
    requests = []
    for i, (family, shared, own, at) in enumerate(shapes):
        prompt = [1 + (family * 7 + k) % 40 for k in range(shared)] + [1 + (i * 11 + k) % 40 for k in range(own)]
        requests.append((at, request(str(i), prompt, arrival=float(i), max_tokens=3), prompt))
    now = 0
    while any(at >= now for at, *_ in requests) or b.requests:
        for at, r, _ in requests:
            if at == now:
                b.add(now, r)
        for r in b.loads(now, 4):
            b.loaded(now, r)
        if (step := b.schedule(now)) is not None:
            run_step(b, now, step)
        now += 1
        assert now < 500
    for _, r, prompt in requests:
        assert list(r.output_ids) == alone(prompt, 3)
    b.check_integrity()
