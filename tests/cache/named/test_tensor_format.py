"""The head of a tensor's value: upstream's bytes, and what is refused."""

from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.named.tensor_format import DTYPES, HEAD_BYTES, NotATensor, Shard, TensorHead, shards

SHAPES = st.lists(st.integers(0, 100), max_size=8).map(tuple)


@given(st.sampled_from(list(DTYPES)), SHAPES)
def test_a_head_comes_back(dtype, shape):
    head = TensorHead(dtype, shape)
    packed = head.pack()
    assert TensorHead.unpack(packed + b"elements", HEAD_BYTES + head.nbytes) == head
    with pytest.raises(NotATensor):
        TensorHead.unpack(packed, HEAD_BYTES + head.nbytes + 1)
    with pytest.raises(NotATensor):
        TensorHead.unpack(packed[:-1], HEAD_BYTES + head.nbytes)


def test_the_bytes_are_upstreams():
    """As its wheel 0.3.13 writes part 1 of 2 of 4 x 3 float32 elements."""
    whole, part = shards(TensorHead("float32", (4, 3)), 2, 0)[0], shards(TensorHead("float32", (4, 3)), 2, 0)[1]
    assert (whole.shape, part.shape, part.shard) == ((2, 3), (2, 3), Shard(1, 2, 0, (4, 3)))
    expected = bytes.fromhex("4e4f4f4d01003001000000000200000001000000000000003001000000000000") + pack("<Q", 24)
    expected += pack("<8q8q", 4, 3, *[-1] * 6, 2, 3, *[-1] * 6)
    expected += pack("<8iq", 1, 0, 1, 0, 1, 2, 0, 0, 2) + bytes(96)
    assert part.pack() == expected
    assert TensorHead.unpack(expected, HEAD_BYTES + 24) == part


@given(SHAPES, st.integers(-2, 9), st.integers(-1, 9))
def test_parts_are_equal_and_make_the_whole(shape, count, dim):
    head = TensorHead("int16", shape)
    if count < 1 or not 0 <= dim < len(shape) or shape[dim] % count:
        with pytest.raises(NotATensor):
            shards(head, count, dim)
        return
    parts = shards(head, count, dim)
    assert len({part.shape for part in parts}) == 1 and sum(part.nbytes for part in parts) == head.nbytes
    assert [part.shard and part.shard.rank for part in parts] == list(range(count))


@pytest.mark.parametrize("head", [TensorHead("complex64", (1,)), TensorHead("int8", (1,) * 9)])
def test_what_the_format_cannot_hold_is_refused(head):
    with pytest.raises(NotATensor):
        head.pack()


@pytest.mark.parametrize("at", [0, 4, 6, 8, 11, 12, 16, 24, 32, 104])
def test_a_changed_head_is_refused(at):
    packed = bytearray(TensorHead("int8", (3, 4)).pack())
    packed[at] ^= 0x7F
    with pytest.raises(NotATensor):
        TensorHead.unpack(packed, HEAD_BYTES + 12)
