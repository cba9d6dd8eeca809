"""Rails and the send queue's books: pure, against models."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.transfer.common.rails import BACKOFF_MAX_S, BACKOFF_S, Rail, choose, cut
from net.transfer.rdma.send_queue import SendQueue


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 22), st.integers(1, 1 << 20))
def test_slices_cover_the_span_in_order(offset, length, piece):
    slices = cut(offset, min(length, 200 * piece), piece)
    end = offset
    for start, size in slices:
        assert start == end
        assert 0 < size <= piece + piece // 4
        end = start + size
    assert end == offset + min(length, 200 * piece)


def test_a_slice_goes_where_it_is_done_first():
    fast = Rail("fast", up=True, bytes_per_s=4e9, measured=True)
    slow = Rail("slow", up=True, bytes_per_s=1e9, measured=True)
    sent = [0, 0]
    for _ in range(100):
        index = choose([fast, slow], 1000, [1, 1])
        (fast, slow)[index].sent(0.0, 1000)
        sent[index] += 1
    assert sent == [80, 20]
    assert choose([fast, slow], 1000, [0, 1]) == 1
    slow.failed(0.0)
    assert choose([fast, slow], 1000, [0, 1]) is None


def test_a_rail_that_is_not_measured_is_taken_for_one_like_the_others():
    slow, new = Rail("slow", up=True, bytes_per_s=1e6, measured=True), Rail("new", up=True)
    sent = [0, 0]
    for _ in range(100):
        index = choose([slow, new], 1000, [1, 1])
        (slow, new)[index].sent(0.0, 1000)
        sent[index] += 1
    assert sent == [50, 50]
    assert new.row()["gb_per_s"] == 0.0, "a guess is not told as a measurement"


def test_the_estimate_follows_the_measurements():
    rail, now = Rail("r", up=True), 0.0
    rail.sent(now, 4 << 20)
    now += (4 << 20) / 9e8
    rail.arrived(now, 4 << 20)
    assert rail.measured and rail.bytes_per_s == pytest.approx(9e8), "the first one counts in full"
    for _ in range(60):
        rail.sent(now, 4 << 20)
        now += (4 << 20) / 2.5e9
        rail.arrived(now, 4 << 20)
    assert rail.bytes_per_s == pytest.approx(2.5e9, rel=0.01)
    assert rail.in_flight == 0


def test_back_off_doubles_to_a_limit_and_a_success_ends_it():
    rail, waits, now = Rail("r"), [], 0.0
    rail.opened()
    for _ in range(10):
        rail.failed(now)
        rail.failed(now)  # told twice: one failure
        waits.append(rail.retry_at - now)
        now = rail.retry_at
        rail.opened()
    assert waits[:4] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert waits[-1] == BACKOFF_MAX_S
    assert rail.failures == 10
    rail.sent(now, 1)
    rail.arrived(now, 1)
    rail.failed(now)
    assert rail.retry_at - now == BACKOFF_S


@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_lost_and_none_runs_without_a_signal_behind_it(seed):
    """Against a card that completes in order and reports only signalled requests."""
    rng = random.Random(seed)
    print("seed", seed)
    depth = rng.randint(1, 40)
    queue, card, finished = SendQueue(depth, rng.randint(1, depth)), deque(), []
    posted = 0
    for _ in range(300):
        if rng.random() < 0.5 and queue.room:
            items = list(range(posted, posted + rng.randint(1, queue.room)))
            posted += len(items)
            marks = queue.post(items)
            assert marks[-1][1], "the last of a batch is signalled"
            card.extend(marks)
        elif card:
            for _ in range(rng.randint(1, len(card))):
                number, signalled = card.popleft()
                if signalled:
                    finished += queue.completed(number)
        assert len(queue) + queue.room == depth
    while card:
        number, signalled = card.popleft()
        if signalled:
            finished += queue.completed(number)
    assert finished == list(range(posted))
    assert queue.room == depth


def test_a_failure_splits_what_succeeded_from_what_did_not():
    queue = SendQueue(10, 4)
    queue.post(list("abcdef"))
    assert queue.failed(3) == (["a", "b"], ["c", "d", "e", "f"])
    assert not queue.knows(4)
    queue.post(["g"])
    assert queue.knows(7) and not queue.knows(3)
    with pytest.raises(ValueError, match="do not fit"):
        queue.post(list(range(10)))
