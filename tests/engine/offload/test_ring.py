"""The ring of buffers: order, waits, errors, passes that end early."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from engine.offload.ring import Ring

BYTES = 100


class Disk:
    """Writes numbers into buffers, and remembers them."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.broken: set[int] = set()
        self.gate = threading.Semaphore(1000)

    def __call__(self, number: int, buffer: list[int]) -> int:
        self.gate.acquire()
        self.read.append(number)
        if number in self.broken:
            raise OSError(f"{number} is broken")
        buffer[0] = number
        return BYTES


@pytest.fixture
def disk():
    return Disk()


def ring_of(disk: Disk, order, count: int):
    return Ring(disk, order, [[-1] for _ in range(count)], BYTES, 1e9)


@pytest.fixture
def ring(disk):
    made = ring_of(disk, (2, 5, 7), 2)
    yield made
    made.close()


def test_passes_get_what_they_want_in_order(disk, ring):
    for _ in range(5):
        for wanted in (2, 5, 7):
            with ring.use(wanted) as buffer:
                assert buffer == [wanted]
    assert ring.skipped == 0 and disk.read[:15] == [2, 5, 7] * 5
    assert ring.nbytes >= 15 * BYTES and ring.rate > 0


def test_no_more_is_read_than_there_are_buffers(disk, ring):
    """While one is in use, only one other is filled."""
    with ring.use(2):
        disk.gate = threading.Semaphore(0)
        for _ in range(100):
            if len(disk.read) >= 2:
                break
            threading.Event().wait(0.01)
        assert disk.read == [2, 5]
    disk.gate.release(1000)
    with ring.use(5) as buffer:
        assert buffer == [5]


def test_the_user_waits_for_the_reader(disk):
    disk.gate = threading.Semaphore(0)
    ring = ring_of(disk, (1,), 2)
    threading.Timer(0.05, disk.gate.release, (100,)).start()
    with ring.use(1) as buffer:
        assert buffer == [1]
    assert ring.waited_s > 0.01
    ring.close()


def test_a_pass_that_ended_early_leaves_the_next_one_right(ring):
    for wanted in (2, 5, 2, 5, 7, 2, 2):
        with ring.use(wanted) as buffer:
            assert buffer == [wanted]
    assert ring.skipped == 1 + 2


def test_an_error_reaches_who_wants_it_and_others_go_on(disk):
    disk.broken = {5}
    ring = ring_of(disk, (2, 5, 7), 2)
    for _ in range(3):
        with ring.use(2) as buffer:
            assert buffer == [2]
        with pytest.raises(OSError, match="5 is broken"), ring.use(5):
            pass
        with ring.use(7) as buffer:
            assert buffer == [7]
    disk.broken = set()
    for wanted in (2, 5, 7):  # 5 may have been read before the disk was whole again
        with suppress(OSError), ring.use(wanted):
            pass
    for wanted in (2, 5, 7):
        with ring.use(wanted) as buffer:
            assert buffer == [wanted]
    ring.close()


def test_an_error_of_the_user_gives_the_buffer_back(ring):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), ring.use(2):
            raise ZeroDivisionError
    with ring.use(5) as buffer:
        assert buffer == [5]


def test_close_ends_the_thread_however_full_the_ring_is(disk):
    before = threading.active_count()
    ring = ring_of(disk, (0, 1, 2, 3), 3)
    with ring.use(0):
        pass
    ring.close()
    ring.close()
    assert threading.active_count() == before
