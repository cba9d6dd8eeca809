"""Merging never changes which bytes go where; bounds are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.errors import TransferError
from net.transfer.common.spans import Cursor, check, merged, pack, runs, sides, slices, total, unpack

SIZE = 300
spans = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 20)).filter(
        lambda span: max(span[:2]) + span[2] <= SIZE
    ),
    max_size=30,
)


def bytes_of(moves):
    return [(local + i, remote + i) for local, remote, length in moves for i in range(length)]


@given(spans)
def test_merging_keeps_every_byte_in_order(given_spans):
    moves, total = merged(given_spans, "x", SIZE)
    assert bytes_of(moves) == bytes_of(given_spans)
    assert total == len(bytes_of(given_spans))
    assert all(length > 0 for _, _, length in moves)
    ours = runs([local for local, _, _ in moves], [length for _, _, length in moves])
    assert not moves or sides(moves)[0] == ours
    assert [at + i for at, length in ours for i in range(length)] == [local for local, _ in bytes_of(given_spans)]
    assert unpack(memoryview(pack(ours))) == ours


@given(spans, st.integers(1, 40))
def test_slices_are_full_but_the_last_and_keep_every_byte(given_spans, nbytes):
    pieces = list(slices(given_spans, nbytes))
    assert [byte for piece in pieces for byte in bytes_of(piece)] == bytes_of(given_spans)
    assert all(total(piece) == nbytes for piece in pieces[:-1])
    assert all(0 < total(piece) <= nbytes for piece in pieces[-1:])


def test_neighbours_become_one():
    assert merged([(0, 50, 10), (10, 60, 10), (20, 0, 5)], "x", SIZE) == ([(0, 50, 20), (20, 0, 5)], 25)
    assert merged([(0, 0, 10), (10, 10, 10)], "x", SIZE) == ([(0, 0, 20)], 20)


@given(spans, st.integers(1, 40))
def test_a_cursor_hands_out_the_stream(given_spans, piece):
    memory = memoryview(bytes(i & 255 for i in range(SIZE)))
    pairs = [(local, length) for local, _, length in given_spans if length]
    cursor = Cursor(memory, pairs)
    taken = b""
    while cursor.left:
        taken += b"".join(cursor.take(min(piece, cursor.left)))
    assert taken == b"".join(memory[at : at + length] for at, length in pairs)
    with pytest.raises(ValueError, match=r"only .* remain"):
        cursor.take(1)


@pytest.mark.parametrize("span", [(-1, 0, 5), (0, -1, 5), (0, 0, -5), (SIZE, 0, 1), (SIZE - 4, 0, 5)])
def test_spans_outside_are_refused(span):
    with pytest.raises(TransferError, match="outside region 'x'"):
        merged([(0, 0, 1), span], "x", SIZE)


def test_runs_outside_are_refused():
    check([(0, SIZE), (SIZE, 0)], "x", SIZE)
    with pytest.raises(TransferError, match="outside region 'x'"):
        check([(SIZE - 1, 2)], "x", SIZE)
    with pytest.raises(TransferError, match="multiple"):
        unpack(memoryview(b"123"))
