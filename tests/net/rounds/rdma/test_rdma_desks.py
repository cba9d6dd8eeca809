"""What two desks do with mirrors, without verbs: a mirror here copies memory. tests/rdma has cards."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from net.rounds.desk import ASKED_AT, HEAD_AT, await_answers, new_bell, new_region
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.outpost import unheard, untaken
from net.rounds.rdma.mirror import MOST_WRITES, NUMBER_BYTES, SENDS, Part, pieces
from net.rounds.rdma.rdma_desk import RdmaDesk
from net.rounds.rdma.rdma_outpost import RdmaOutpost
from net.transfer.common.memory import Region
from net.transfer.rdma.queue_pair import SIGNAL_EVERY
from net.transfer.rdma.send_queue import SendQueue
from tests.net.rounds.test_remote_desk import connected, until

LAYOUT = Layout(most_rows=40, hidden=64, top_k=2, dtype="float32")
CODED = Layout(most_rows=40, hidden=64, top_k=2, dtype="bfloat16", codes="int8")


class Copying:
    """A Mirror whose other end is in this process. `lands`: whether what is written arrives."""

    def __init__(self, region: Region) -> None:
        self.region, self.device, self.broken, self.lands = region, "card", None, True
        self.other: Copying | None = None
        self.closed = threading.Event()
        self.written: list[Part] = []
        self._landed: Callable[[], None] = lambda: None
        self.ended: Callable[[str], None] = lambda why: None

    def watch(self, landed: Callable[[], None], ended: Callable[[str], None]) -> None:
        self._landed, self.ended = landed, ended

    def write(self, parts: Iterable[Part], at: int) -> None:
        assert self.other is not None
        for begin, nbytes in [*parts, (at, NUMBER_BYTES)]:
            self.written.append((begin, nbytes))
            if self.lands and not self.closed.is_set() and not self.other.closed.is_set():
                self.other.region.memory[begin : begin + nbytes] = self.region.memory[begin : begin + nbytes]
        if self.lands:
            self.other._landed()

    def close(self) -> None:
        self.closed.set()


class Ends:
    def __init__(self, layout: Layout) -> None:
        near, far = connected(None, None)
        assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
        self.bell, self.ended, self.got = new_bell("bell"), list[str](), list[tuple[list[int], bytearray]]()
        self.mirrors = [Copying(new_region("desk", layout)) for _ in range(2)]
        self.mirrors[0].other, self.mirrors[1].other = self.mirrors[1], self.mirrors[0]
        self.outpost = RdmaOutpost(far, layout, self.mirrors[1], self._take, unheard).__enter__()  # type: ignore[arg-type]
        self.desk = RdmaDesk(near, layout, self.bell, self.mirrors[0], self.ended.append)  # type: ignore[arg-type]

    def _take(self, head: list[int], nbytes: int) -> list[memoryview]:
        if head[0] != 3:
            return [*untaken(head, nbytes)]
        self.got.append((head, bytearray(nbytes)))
        return [memoryview(self.got[-1][1])]

    def close(self) -> None:
        self.desk.close()
        self.outpost.__exit__()
        self.bell.close()


@pytest.fixture
def ends() -> Iterator[Callable[[Layout], Ends]]:
    made: list[Ends] = []

    def opened(layout: Layout) -> Ends:
        made.append(Ends(layout))
        return made[-1]

    yield opened
    for one in made:
        one.close()


def answered(made: Ends, rows: int, seed: int) -> None:
    """Ask for `rows` rows, compare both ways."""
    rng, layout = random.Random(seed), made.desk.layout
    here, there = made.desk.region.memory, made.outpost.desk.region.memory
    here[PAGE : PAGE + layout.message_bytes] = rng.randbytes(layout.message_bytes)
    made.desk.ask(0, 5, rows, 2 * rows)
    message = made.outpost.next_message(30.0)
    assert message is not None and message.head[:4] == [0, 5, rows, 2 * rows]
    for at, nbytes in layout.parts(rows, 2 * rows):
        assert here[PAGE + at : PAGE + at + nbytes] == there[PAGE + at : PAGE + at + nbytes]
    begin, nbytes = PAGE + layout.message_bytes, layout.answer_part(rows)
    there[begin : begin + layout.answer_bytes] = rng.randbytes(layout.answer_bytes)
    assert not made.desk.idle
    made.outpost.answered(message)
    assert await_answers([made.desk], made.bell, 30.0) == [True] and made.desk.idle
    assert here[begin : begin + nbytes] == there[begin : begin + nbytes]


@pytest.mark.parametrize("layout", [LAYOUT, CODED], ids=["float32", "int8"])
def test_only_what_a_message_fills_is_written_and_the_number_last(ends, layout):
    made = ends(layout)
    for seed, rows in enumerate((1, 7, 40)):
        for mirror in made.mirrors:
            mirror.written.clear()
        answered(made, rows, seed)
        asked, answers = (mirror.written for mirror in made.mirrors)
        assert asked[0] == (HEAD_AT, 64) and asked[-1] == (ASKED_AT, 8)
        assert sum(nbytes for _, nbytes in asked) == 72 + rows * (layout.sent_row_bytes + 2 * 3 * 4)
        assert answers == [(PAGE + layout.message_bytes, layout.answer_part(rows)), (64, 8)]
    until(lambda: made.desk.beats > 2)  # over TCP
    assert not made.ended


def test_experts_that_move_come_over_tcp_in_turn_with_messages(ends):
    made = ends(LAYOUT)
    answered(made, 3, 1)
    for more in (bytes(range(200)), bytes(100_000)):
        made.desk.give([memoryview(more)], 3, 1, 0, 0, 5, 2, 1)
        message = made.outpost.next_message(30.0)
        assert message is not None and message.head[:7] == [3, 1, 0, 0, 5, 2, 1] and made.got[-1][1] == more
        made.outpost.answered(message)
        assert await_answers([made.desk], made.bell, 30.0) == [True]
        answered(made, 2, 2)
    assert not made.ended and made.outpost.ended is None


@pytest.mark.parametrize("head", [(0, 0, 41, 0), (0, 0, -1, 0), (0, 0, 1, 81)])
def test_a_message_that_has_no_room_is_refused_though_a_card_has_written_it(ends, monkeypatch, head):
    made = ends(LAYOUT)
    monkeypatch.setattr(Layout, "parts", lambda *given: [])
    made.desk.ask(*head)
    monkeypatch.undo()
    assert made.outpost.next_message(30.0) is None
    assert "are no message of at most 40 rows" in made.outpost.ended
    until(lambda: bool(made.ended))


def test_a_number_that_is_not_the_next_one_is_no_message(ends):
    """Soft-RoCE may write it byte by byte: from 255 to 256 there are 511 and 0 in between."""
    made = ends(LAYOUT)
    for number in range(255):
        made.desk.ask(2, 0, 0, 0)
        message = made.outpost.next_message(30.0)
        assert message is not None and message.number == number + 1
        made.outpost.answered(message)
    word = made.outpost.desk.region.memory[ASKED_AT : ASKED_AT + 8]
    for torn in (511, 0, 255):
        word[:] = torn.to_bytes(8, "little")
        assert made.outpost.next_message(0.02) is None
    word[:] = (256).to_bytes(8, "little")
    message = made.outpost.next_message(30.0)
    assert message is not None and message.number == 256 and made.outpost.ended is None


def test_an_answer_over_tcp_ends_the_connection(ends):
    made = ends(LAYOUT)
    made.desk.ask(0, 0, 2, 4)
    made.outpost._wire.send({"a": 1}, [memoryview(bytes(LAYOUT.answer_part(2)))])
    until(lambda: bool(made.ended))
    assert made.ended == ["an answer came over TCP, where cards write them"] and not made.desk.idle


def test_a_broken_queue_pair_ends_the_connection_on_the_asking_side(ends):
    made = ends(LAYOUT)
    made.mirrors[0].broken = "RDMA over card: transport retry counter exceeded"
    made.mirrors[0].ended(made.mirrors[0].broken)
    until(lambda: bool(made.ended) and made.outpost.ended is not None)
    assert made.ended == ["RDMA over card: transport retry counter exceeded"]
    assert "closed at the other end" in made.outpost.ended


def test_a_broken_queue_pair_ends_the_connection_on_the_answering_side(ends):
    made = ends(LAYOUT)
    made.mirrors[1].ended("RDMA over card: transport retry counter exceeded")
    until(lambda: bool(made.ended))
    assert made.outpost.ended == "RDMA over card: transport retry counter exceeded"
    assert "closed at the other end" in made.ended[0]


def test_nothing_lands_any_more_when_the_end_is_told(ends):
    """The desk stays in the group until another one has its place."""
    made = ends(LAYOUT)
    made.desk.ask(0, 0, 2, 4)
    message = made.outpost.next_message(30.0)
    made.outpost._wire.end()
    until(lambda: bool(made.ended))
    assert made.mirrors[0].closed.is_set()
    assert message is not None
    made.outpost.answered(message)  # late
    assert not made.desk.idle and made.desk.region.memory[64:72] == bytes(8)


def test_a_message_that_does_not_arrive_is_not_answered(ends):
    made = ends(LAYOUT)
    made.mirrors[0].lands = False
    made.desk.ask(0, 0, 2, 4)
    assert made.outpost.next_message(0.05) is None and not made.desk.idle


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_same_bytes(seed):
    rng = random.Random(seed)
    print("seed", seed)
    parts = [(rng.randrange(1000), rng.randrange(50)) for _ in range(5)]
    most = rng.randint(1, 20)
    found = list(pieces(parts, most))
    assert all(0 < nbytes <= most for _, nbytes in found)
    assert [at + i for at, nbytes in found for i in range(nbytes)] == [
        at + i for at, nbytes in parts for i in range(nbytes)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_message_always_finds_room_when_the_one_before_has_been_answered(seed):
    """Its requests have completed by then; only signalled ones tell."""
    rng = random.Random(seed)
    print("seed", seed)
    queue: SendQueue[None] = SendQueue(SENDS, SIGNAL_EVERY)
    before: list[tuple[int, bool]] = []
    for _ in range(500):
        count = rng.randint(1, MOST_WRITES)
        assert queue.room >= count
        marks = queue.post([None] * count, signal_last=False)
        for number, signalled in before:  # the completions of the last message come late
            if signalled:
                queue.completed(number)
        before = marks
