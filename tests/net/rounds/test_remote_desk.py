"""Messages and answers over a TCP connection: the bytes that arrive, in clear and sealed, and how it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from net.channel.keyring import Key, Keyring
from net.channel.sealed_stream import SealedStream
from net.channel.wire import encode
from net.errors import PeerLost, PeerRefused
from net.rounds.desk import await_answers, new_bell
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.outpost import Outpost
from net.rounds.remote_desk import RemoteDesk
from net.transfer.common.memory import Region

LAYOUT = Layout(most_rows=600, hidden=4096, top_k=2, dtype="float32")
CODED = Layout(most_rows=600, hidden=4096, top_k=2, dtype="bfloat16", codes="int8")
RING = Keyring((Key(b"a" * 32),))


def connected(
    near: Keyring | None, far: Keyring | None, silence_s: float = 20.0
) -> tuple[FrameSocket | Exception, FrameSocket | Exception]:
    """Both ends of a connection over the loopback, or why there is none."""
    made: list[FrameSocket | Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                made.append(FrameSocket.accepted(listener.accept()[0], near, silence_s))
                made[0].frame()  # type: ignore[union-attr]
            except (PeerLost, PeerRefused) as error:
                made[:] = [error]

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            other: FrameSocket | Exception = FrameSocket.dial(listener.getsockname(), far, silence_s)
            assert isinstance(other, FrameSocket)
            other.send({"hello": True})
            if near != far:
                refused = other.frame().header
                other = PeerRefused(str(refused["refused"]))
        except (PeerLost, PeerRefused) as error:
            other = error
        thread.join()
    return made[0], other


@pytest.fixture
def ends() -> Iterator[Callable[..., tuple[RemoteDesk, Outpost, Region, list[str]]]]:
    """Closed at the end."""
    close: list[Callable[[], None]] = []

    def made(
        layout: Layout, ring: Keyring | None = None, silence_s: float = 20.0
    ) -> tuple[RemoteDesk, Outpost, Region, list[str]]:
        near, far = connected(ring, ring, silence_s)
        assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
        bell, ended = new_bell("bell"), list[str]()
        outpost = Outpost(far, layout).__enter__()
        desk = RemoteDesk(near, layout, bell, ended.append)
        close.extend([desk.close, lambda: outpost.__exit__(), bell.close])
        return desk, outpost, bell, ended

    yield made
    for one in close:
        one()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("ring", [None, RING], ids=["clear", "sealed"])
@pytest.mark.parametrize("layout", [LAYOUT, CODED], ids=["float32", "int8"])
@pytest.mark.parametrize("rows", [1, 37, 600])
def test_what_a_message_fills_arrives_and_the_answer_comes_back(ends, ring, layout, rows):
    desk, outpost, bell, ended = ends(layout, ring)
    for number in range(1, 4):
        here = np.frombuffer(desk.region.memory, np.uint8)[PAGE:]
        there = np.frombuffer(outpost.desk.region.memory, np.uint8)[PAGE:]
        here[:] = np.frombuffer(os.urandom(here.nbytes), np.uint8)
        desk.ask(0, 5, rows, 2 * rows)
        message = outpost.desk.next_message(30.0)
        assert message is not None and message.number == number and message.head[:4] == [0, 5, rows, 2 * rows]
        parts = layout.parts(rows, 2 * rows)
        assert sum(size for _, size in parts) == rows * (layout.sent_row_bytes + 2 * 3 * 4)
        assert all((here[at : at + size] == there[at : at + size]).all() for at, size in parts)
        answer = layout.answer_part(rows)
        there[layout.message_bytes :] = np.frombuffer(os.urandom(layout.answer_bytes), np.uint8)
        assert not desk.idle
        outpost.answered(message)
        assert await_answers([desk], bell, 30.0) == [True] and desk.idle
        begin = layout.message_bytes
        assert (here[begin : begin + answer] == there[begin : begin + answer]).all()
    assert not ended
    before = desk.beats
    until(lambda: desk.beats > before + 2)


def test_the_end_of_either_side_is_noticed(ends):
    desk, outpost, _, ended = ends(LAYOUT)
    outpost.__exit__()
    until(lambda: bool(ended))
    assert "closed at the other end" in ended[0]
    desk.ask(0, 0, 600, 1200)  # nobody is there: no error, and no answer
    assert not desk.idle

    desk, outpost, _, ended = ends(LAYOUT)
    desk.close()
    until(lambda: outpost.ended is not None)
    assert not ended


def test_a_side_from_which_nothing_comes_is_given_up(ends):
    desk, outpost, _, ended = ends(LAYOUT, silence_s=1.0)
    until(lambda: desk.beats > 0)
    outpost._stop.set()  # no beats any more
    until(lambda: bool(ended))
    assert ended == ["nothing came for 1 s"]


def test_a_side_that_would_like_to_end_answers_until_it_is_let_go(ends):
    desk, outpost, bell, ended = ends(LAYOUT)
    left: list[bool] = []
    desk._leaves = lambda: left.append(True)
    outpost.leave()
    until(lambda: bool(left))
    desk.ask(0, 0, 2, 4)
    message = outpost.desk.next_message(30.0)
    assert message is not None
    outpost.answered(message)
    assert await_answers([desk], bell, 30.0) == [True] and outpost.ended is None
    desk.dismiss()
    until(lambda: outpost.ended is not None)
    assert outpost.ended == "the other side has let this one go"
    outpost.__exit__()
    until(lambda: bool(ended))
    desk.dismiss()  # nobody is there: no error
    assert left == [True]


@pytest.mark.parametrize("ring", [None, RING], ids=["clear", "sealed"])
def test_bytes_that_have_no_room_in_a_message_come_with_it(ends, ring):
    desk, outpost, bell, ended = ends(LAYOUT, ring)
    nbytes, got = LAYOUT.message_bytes + 12_345, list[tuple[list[int], bytearray]]()

    def take(head: list[int], more: int) -> list[memoryview]:
        got.append((head, bytearray(more)))
        return [memoryview(got[-1][1])]

    outpost._take = take
    for rows in (0, 3):
        more = os.urandom(nbytes)
        desk.give([memoryview(more)[:100], memoryview(more)[100:]], 3, 0, rows, 2 * rows, 7)
        message = outpost.desk.next_message(30.0)
        assert message is not None and message.head[:5] == [3, 0, rows, 2 * rows, 7]
        assert got[-1] == ([3, 0, rows, 2 * rows, 7], more)
        outpost.answered(message)
        assert await_answers([desk], bell, 30.0) == [True]
    assert len(got) == 2 and not ended


@pytest.mark.parametrize("more", [5, -5, "5", True])
def test_bytes_that_nobody_takes_end_the_connection(ends, more):
    desk, outpost, _, _ = ends(LAYOUT)
    desk._wire.send({"m": 1, "h": [0, 0, 0, 0], "x": more}, [memoryview(bytes(5))])
    until(lambda: outpost.ended is not None)
    told = "5 bytes came that belong to no message" if more == 5 else f"{more} is no number of bytes"
    assert outpost.ended == told


def test_bytes_that_were_announced_and_did_not_come_end_the_connection(ends):
    desk, outpost, _, _ = ends(LAYOUT)
    desk._wire.send({"m": 1, "h": [0, 0, 0, 0], "x": 5})
    until(lambda: outpost.ended is not None)
    assert outpost.ended == "-5 bytes are no message of 0 bytes"


def test_bytes_that_are_no_answer_end_the_connection(ends):
    desk, outpost, _, ended = ends(LAYOUT)
    desk.ask(0, 0, 2, 4)
    outpost._wire.send({"a": 1}, [memoryview(bytes(100))])
    until(lambda: bool(ended))
    assert "100 bytes are no answer to message 1" in ended[0]


def test_a_message_before_the_answer_ends_the_connection(ends):
    desk, outpost, _, _ = ends(LAYOUT)
    desk.ask(0, 0, 2, 4)
    desk.ask(0, 0, 2, 4)
    until(lambda: outpost.ended is not None)
    assert "came before message 1 was answered" in (outpost.ended or "")


@pytest.mark.parametrize("header", [{"a": 1}, {"a": 2}, {"a": "x"}, {"a": None}])
def test_an_answer_without_rows_ends_the_connection(ends, header):
    """It would be the answer to a message that has rows; the memory still has an older one."""
    desk, outpost, _, ended = ends(LAYOUT)
    desk.ask(0, 0, 2, 4)
    outpost._wire.send(header)
    until(lambda: bool(ended))
    assert "0 bytes are no answer to message 1" in ended[0] and not desk.idle


def test_a_second_answer_ends_the_connection(ends):
    desk, outpost, bell, ended = ends(LAYOUT)
    desk.ask(0, 0, 2, 4)
    message = outpost.desk.next_message(30.0)
    assert message is not None
    outpost.answered(message)
    assert await_answers([desk], bell, 30.0) == [True] and not ended
    outpost._wire.send({"a": 1}, [memoryview(bytes(LAYOUT.answer_part(2)))])
    until(lambda: bool(ended))
    assert "no answer to message 1" in ended[0]


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ([{"m": 1, "h": [0, 0, 2, 4]}], "0 bytes are no message of"),
        ([{"m": 7, "h": [0, 0, 0, 0]}], "message 7 came before message 0 was answered"),
        ([{"m": 1, "h": [2, 0, 0, 0]}, {"m": 2, "h": [2, 0, 0, 0]}], "message 2 came before message 1 was answered"),
        ([{"m": 1, "h": [0, 0, 601, 0]}], "601 rows and 0 pairs are no message"),
        ([{"m": 1, "h": [0, 0, -1, 0]}], "-1 rows and 0 pairs are no message"),
    ],
)
def test_messages_without_payload_are_checked_too(ends, headers, told):
    desk, outpost, _, _ = ends(LAYOUT)
    for header in headers:
        desk._wire.send(header)
    until(lambda: outpost.ended is not None)
    assert told in (outpost.ended or "")
    assert outpost.desk.asked == len(headers) - 1


def test_a_header_may_be_long_for_a_side_that_asked_for_it():
    header = {"welcome": list(range(40_000))}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for long in (False, True):
            near = FrameSocket.dial(listener.getsockname(), None, 20.0)
            far = FrameSocket.accepted(listener.accept()[0], None, 20.0)
            if long:
                near.expect_long()
            thread = threading.Thread(target=far.send, args=(header,))
            thread.start()
            if long:
                assert near.frame().header == header
            else:
                with pytest.raises(PeerLost, match=r"a header of .* bytes exceeds the limit of 65536"):
                    near.frame()
            thread.join()
            near.close()
            far.close()


@pytest.mark.parametrize("ring", [None, RING], ids=["clear", "sealed"])
def test_a_byte_now_and_then_does_not_put_off_the_hello(ring):
    """The connection is never silent for as long as `silence_s`."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as far:
        stop = threading.Event()

        def drip() -> None:
            greeting = encode({"join": {}}) if ring is None else SealedStream(ring, True, bytes(32)).greeting()
            for byte in greeting[:-1]:
                if stop.wait(0.05):
                    return
                far.sendall(bytes([byte]))
            stop.wait(30)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(PeerLost, match="did not say in time who it is"):
            near = FrameSocket.accepted(listener.accept()[0], ring, 20.0, 0.4)
            near.frame()
        assert thread.is_alive()
        stop.set()
        thread.join()
        if ring is None:
            near.close()


@pytest.mark.parametrize(
    ("near", "far", "told"),
    [
        (RING, None, "one of the two nodes has a cluster key"),
        (None, RING, "one of the two nodes has a cluster key"),
        (RING, Keyring((Key(b"b" * 32),)), "no cluster key in common"),
    ],
)
def test_other_keys_are_refused_on_both_sides(near, far, told):
    for error in connected(near, far):
        assert isinstance(error, PeerRefused) and told in str(error)


def test_a_stranger_gets_no_memory():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as far:
        near = FrameSocket.accepted(listener.accept()[0], None, 20.0)
        far.sendall(encode({"join": {}}, [bytes(10)]))
        with pytest.raises(PeerLost, match="before both sides knew each other"):
            near.frame()
        near.close()


def test_more_than_a_message_has_room_for_is_no_message():
    with pytest.raises(ValueError, match="601 rows and 0 pairs"):
        LAYOUT.parts(601, 0)
