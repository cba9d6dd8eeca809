"""Blocks in pieces, written into lent slots: the bytes, their checksum, and the order of the announcements."""

import random
import threading
from ctypes import addressof, c_char

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.arena import checksum
from cache.index.loans import (
    ASLEEP,
    CLOSED,
    FIRST_NUMBER,
    FREE,
    LENT,
    LOANS_BYTES,
    PAGE_ROWS,
    PAGES,
    SHORT_BYTES,
    Loans,
    LoanWrite,
)
from net.transfer.common.memory import Region


@pytest.fixture(scope="module")
def code():
    return LoanWrite()


@pytest.fixture
def loans():
    made = Loans.new()
    yield made
    made.close()
    made.region.close()


def fill(code, loans, page, row, target, pieces, key=b"k" * 16):
    """`pieces`: bytearrays."""
    places = [(addressof(c_char.from_buffer(piece)) if piece else 0, len(piece)) for piece in pieces]
    return code.fill(loans, loans.address(page, row), target, places, sum(map(len, pieces)), key)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 7, 63, 64, 65, 512, 1023, 1024, 1025, 2048, 5000, 70_000]), max_size=9),
    st.integers(SHORT_BYTES + 1, 3000),
    st.sampled_from([0, 1, 32]),
)
def test_pieces_of_every_length_arrive_with_the_checksum_of_the_whole(lengths, last, shift):
    """Those of the xxhash package, on both sides of the size from which stores bypass the caches."""
    loans, code = Loans.new(), LoanWrite()
    pieces = [bytearray(random.Random(i).randbytes(length)) for i, length in enumerate([*lengths, last])]
    content = b"".join(pieces)
    arena = Region.private("dram", len(content) + shift + 64)
    arena.memory[:] = b"\xa5" * arena.nbytes
    loans.lend(3, 5, 17)
    fill(code, loans, 3, 5, arena.address + shift, pieces)
    assert arena.memory[shift : shift + len(content)] == content
    assert set(arena.memory[:shift]) | set(arena.memory[shift + len(content) :]) == {0xA5}, "and nothing around it"
    (found,) = loans.filled(3)
    assert found == (FIRST_NUMBER, 5, b"k" * 16, len(content), checksum(content))
    loans.close()
    loans.region.close()
    arena.close()


def test_rows_are_lent_announced_and_lent_again(code, loans):
    arena = Region.private("dram", 4096)
    last = PAGES - 1, PAGE_ROWS - 1
    loans.lend(*last, (1 << 32) - 1)
    loans.lend(last[0], 0, 9)
    assert loans.slot(*last) == (1 << 32) - 1
    assert loans.states(last[0]) == [LENT] + [FREE] * (PAGE_ROWS - 2) + [LENT]
    assert loans.filled(last[0]) == [] and loans.announced == 0
    loans.mood = ASLEEP
    assert fill(code, loans, *last, arena.address, [bytearray(300)]) == ASLEEP
    loans.mood = CLOSED
    assert fill(code, loans, last[0], 0, arena.address, [bytearray(300)], b"l" * 16) == CLOSED
    assert loans.announced == 2
    assert [(one.number, one.row, one.key) for one in loans.filled(last[0])] == [
        (FIRST_NUMBER + 1, 0, b"l" * 16),
        (FIRST_NUMBER, last[1], b"k" * 16),
    ]
    loans.clear(*last)
    loans.lend(*last, 4)
    assert loans.slot(*last) == 4, "the length of the last block is gone"
    assert loans.states(last[0])[-1] == LENT
    arena.close()


def test_threads_get_different_numbers(code, loans):
    arena = Region.private("dram", 8 * 4096)
    for row in range(8):
        loans.lend(0, row, row)

    def work(row):
        for _ in range(200):
            fill(code, loans, 0, row, arena.address + 4096 * row, [bytearray(1200)])
            numbers.append((row, loans.states(0)[row]))

    numbers = []
    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for _, number in numbers) == list(range(FIRST_NUMBER, FIRST_NUMBER + 1600))
    assert loans.announced == 1600
    arena.close()


def test_a_region_of_another_size_is_refused():
    with Region.private("loans", LOANS_BYTES + 8) as region, pytest.raises(ValueError, match="instead of"):
        Loans(region)
