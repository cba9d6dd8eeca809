"""Requests with equal prefixes, in the cache or just being computed: less work, the same tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batcher import Batcher
from tests.engine.toy_model import alone, batcher, request, run_dry, run_step


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
