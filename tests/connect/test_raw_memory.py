"""The pieces of one value."""

import ctypes
import random

import numpy as np
import pytest

from connect.common.raw_memory import Pieces, address_of, blank_bytes


@pytest.mark.parametrize("seed", range(20))
def test_ranges_of_pieces_are_ranges_of_the_value(seed):
    print(f"seed {seed}")
    chance = random.Random(seed)
    parts = [bytearray(chance.randbytes(chance.randrange(0, 50))) for _ in range(chance.randrange(1, 8))]
    whole = bytearray(b"".join(parts))
    value = Pieces.of(*parts)
    assert value.nbytes == len(whole)
    for _ in range(50):
        start = chance.randint(0, len(whole))
        nbytes = chance.randint(0, len(whole) - start)
        room = ctypes.create_string_buffer(nbytes + 1)
        value.copy_to(ctypes.addressof(room), start, nbytes)
        assert room.raw[:nbytes] == whole[start : start + nbytes]
        fresh = chance.randbytes(nbytes)
        value.copy_from(address_of(fresh)[0], start, nbytes)
        whole[start : start + nbytes] = fresh
        assert b"".join(parts) == whole


def test_a_range_outside_of_the_value():
    value = Pieces.of(b"four")
    for start, nbytes in ((0, 5), (-1, 1), (4, 1)):
        with pytest.raises(ValueError, match="of a value of 4"):
            value.copy_to(1, start, nbytes)


@pytest.mark.parametrize(
    "buffer",
    [b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), np.frombuffer(b"bytes", dtype=np.uint8), np.arange(6)],
)
def test_every_kind_of_buffer_has_an_address(buffer):
    address, nbytes, owner = address_of(buffer)
    assert ctypes.string_at(address, nbytes) == bytes(buffer), owner


def test_what_is_no_buffer():
    with pytest.raises(TypeError):
        address_of("text")
    with pytest.raises(BufferError):
        address_of(np.arange(10)[::2])


def test_blank_bytes_belong_to_one_caller():
    one, other = blank_bytes(2), blank_bytes(2)
    assert len(one) == 2 and address_of(one)[0] != address_of(other)[0]
    with pytest.raises(ValueError, match="shared"):
        blank_bytes(1)
