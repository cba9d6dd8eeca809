"""Too few blocks or seats: who gives way, and that nobody loses tokens by it."""

from __future__ import annotations

import pytest

from cache.pool.block_pool import OutOfBlocks
from sched.queueing import EDF
from tests.engine.toy_model import alone, batcher, request, run_dry, run_step


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


def test_whoever_comes_last_gives_its_blocks_back():
    b = batcher(blocks=9, block_size=4, seqs=4, budget=64, order=EDF())
    names = {"old batch": "batch", "new batch": "batch", "chat": "interactive"}
    requests = {}
    for arrival, (name, service_class) in enumerate(names.items()):
        r = request(name, [arrival + 1] * 8, arrival=arrival, max_tokens=9, ignore_eos=True)
        r.service_class = service_class
        requests[name] = r
        b.add(arrival, r)
    run_dry(b, step_s=0.5)  # so long that the chat's steps do not leave class batch out for long
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


def test_reservation_without_room_has_no_side_effects():
    b = batcher(blocks=2)
    b.add(0, request("a", [1] * 4, max_tokens=4))
    b.schedule(0)
    before = b.pool.usage()
    with pytest.raises(OutOfBlocks):
        b.reserve(0, request("big", [2] * 12))
    assert b.pool.usage() == before
    assert "big" not in b.requests


def test_the_last_running_prompt_gives_way_to_handed_over_requests_in_the_same_step():
    """It cannot grow, since the blocks are those of requests that wait for its seat: no step may be skipped for it."""
    b = batcher(blocks=8, block_size=2, seqs=1, budget=8)
    long = request("long", [1] * 12, max_tokens=1)
    b.add(0, long)
    run_step(b, 0, b.schedule(0))
    pushed = [request(name, [2] * 4, arrival=-1.0, max_tokens=2) for name in ("x", "y")]
    for each in pushed:
        b.reserve(1, each)
    for each in pushed:
        b.arrived(1, each, 3)
    step = b.schedule(2)
    assert step is not None and [row.request for row in step.rows] == [pushed[0]]
    run_step(b, 2, step)
    run_dry(b)
    assert long.output_ids and b.pool.usage()["held"] == 0
