"""Questions between transfer engines: how many, and what they ask for."""

import ctypes

import pytest

from connect.engine import questions as code
from connect.engine.messages import Places
from connect.engine.questions import ReadQuestion, WriteQuestion, questions
from net.bodies import BodyError, decode, encode
from net.errors import RemoteError
from net.transfer.common.transport import Op
from net.transfer.tcp.pushing import FRAME_BYTES


def test_questions_have_limits_and_together_all_bytes(monkeypatch):
    monkeypatch.setattr(code, "ASK_BYTES", 1000)
    monkeypatch.setattr(code, "PLACES_MAX", 3)
    moves = [(10_000 * i, 50_000 + 10_000 * i, length) for i, length in enumerate((10, 20, 30, 40, 2500, 1))]
    made = list(questions(Op.READ, moves))
    assert all(isinstance(one, ReadQuestion) for one in made)
    assert [one.expected for one in made] == [60, 940, 1000, 601]
    asked = [row for one in made for row in zip(one.body["addresses"], one.body["lengths"], strict=True)]
    assert [row for row in asked if row[0] < 90_000 or row[0] >= 100_000] == [
        (remote, length) for _, remote, length in moves if length != 2500
    ]
    assert [row for row in asked if 90_000 <= row[0] < 100_000] == [(90_000, 900), (90_900, 1000), (91_900, 600)]
    [one] = questions(Op.WRITE, moves[:3])
    assert isinstance(one, WriteQuestion) and (one.sends, one.is_whole) == (60, True)


def test_a_write_that_has_begun_is_not_repeated():
    memory = ctypes.create_string_buffer(b"0123456789", 10)
    at = ctypes.addressof(memory)
    write = WriteQuestion([(at + 5, 1, 5), (at, 9, 2)], 7)
    assert write.may_repeat and b"".join(write.data().take(7)) == b"5678901"
    write.begin()
    assert not write.may_repeat
    read = ReadQuestion([(at, 1, 3)], 3)
    read.begin()
    assert read.may_repeat
    [view] = read.place({}, 3).take(3)
    view[:] = b"abc"
    assert memory.raw == b"abc3456789"
    with pytest.raises(RemoteError, match="4 bytes arrived, but 3 were requested"):
        read.place({}, 4)
    assert not WriteQuestion([(at, 1, FRAME_BYTES + 1)], FRAME_BYTES + 1).is_whole


@pytest.mark.parametrize(
    "body", [{"addresses": [1], "lengths": []}, {"addresses": [1], "lengths": [0]}, {"addresses": [1], "lengths": [-1]}]
)
def test_places_without_bytes_are_refused(body):
    with pytest.raises(BodyError, match="at least one byte"):
        decode(Places, body)
    assert decode(Places, encode(Places([7], [1]))) == Places([7], [1])
