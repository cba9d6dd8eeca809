"""Messages to ranks of experts over real verbs: what arrives, what wakes sleepers, what a lost rank may not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from net.rounds.desk import ANSWERED_AT, ASKED_AT, await_answers, new_bell
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import PAGE, Layout
from net.rounds.outpost import unheard, untaken
from net.rounds.rdma import meeting, mirror
from net.rounds.rdma.mirror import Mirror
from net.rounds.rdma.rdma_desk import RdmaDesk
from net.rounds.rdma.rdma_outpost import RdmaOutpost
from net.transfer.common.transport import Unusable
from tests.net.rounds.test_remote_desk import connected
from tests.rdma.nodes import sh

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = Layout(most_rows=600, hidden=512, top_k=2, dtype="float32")
BEATS_AT = 128  # Desk of net/rounds/rounds.c
CODED = Layout(most_rows=600, hidden=512, top_k=2, dtype="bfloat16", codes="int8")


def until(true, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def meet(layout, near_device, far_device):
    """(asking wire and mirror, answering wire and mirror); a mirror may be why there is none."""
    near, far = connected(None, None)
    assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
    answering = meeting.opened(far_device, None, layout)
    far.send(meeting.told(answering))
    found = []
    thread = threading.Thread(target=lambda: found.append(meeting.answer(far, answering)))
    thread.start()
    asking = meeting.ask(near, near.frame().header, near_device, None, layout)
    thread.join()
    return near, asking, far, found[0]


def but_beats(made):
    """The memory of the asking desk without its beats, which come over TCP."""
    memory = made.desk.region.memory
    return bytes(memory[:BEATS_AT]) + bytes(memory[BEATS_AT + 8 :])


class Ends:
    def __init__(self, layout, near_device="rxa0", far_device="rxb0"):
        near, asking, far, answering = meet(layout, near_device, far_device)
        assert isinstance(asking, Mirror) and isinstance(answering, Mirror), (asking, answering)
        self.bell, self.ended = new_bell("bell"), []
        self.outpost = RdmaOutpost(far, layout, answering, untaken, unheard).__enter__()
        self.desk = RdmaDesk(near, layout, self.bell, asking, self.ended.append)


@contextmanager
def ends(*given):
    made = Ends(*given)
    try:
        yield made
    finally:
        made.desk.close()
        made.outpost.__exit__()
        made.bell.close()


def exchange(made, rows):
    """One message and its answer, both compared."""
    layout = made.desk.layout
    here, there = made.desk.region.memory, made.outpost.desk.region.memory
    here[PAGE : PAGE + layout.message_bytes] = os.urandom(layout.message_bytes)
    made.desk.ask(0, 5, rows, 2 * rows)
    message = made.outpost.next_message(60.0)
    assert message is not None and message.head[:4] == [0, 5, rows, 2 * rows]
    for at, nbytes in layout.parts(rows, 2 * rows):
        assert here[PAGE + at : PAGE + at + nbytes] == there[PAGE + at : PAGE + at + nbytes]
    begin, nbytes = PAGE + layout.message_bytes, layout.answer_part(rows)
    there[begin : begin + layout.answer_bytes] = os.urandom(layout.answer_bytes)
    made.outpost.answered(message)
    assert await_answers([made.desk], made.bell, 60.0) == [True] and made.desk.idle
    assert here[begin : begin + nbytes] == there[begin : begin + nbytes]


@pytest.mark.parametrize("layout", [LAYOUT, CODED], ids=["float32", "int8"])
@pytest.mark.parametrize("devices", [("rxa0", "rxb0"), ("rxe0", "rxe0")], ids=["two cards", "one card"])
def test_messages_and_answers_of_all_sizes(layout, devices):
    with ends(layout, *devices) as made:
        for rows in (1, 37, 600, 1, 600):
            exchange(made, rows)
        assert not made.ended and made.outpost.ended is None


def test_many_messages_leave_room_in_the_queue():
    with ends(LAYOUT) as made:
        for _ in range(200):
            exchange(made, 1)
        assert made.desk.asked == 200 and not made.ended


def test_who_sleeps_is_woken():
    """After 50 us of spinning both sides sleep in the kernel, where no number in memory wakes them."""
    with ends(LAYOUT) as made:
        got = []

        def answer():
            message = made.outpost.next_message(60.0)
            got.append(time.monotonic())
            time.sleep(0.5)
            made.outpost.answered(message)

        thread = threading.Thread(target=answer)
        thread.start()
        time.sleep(0.5)
        made.desk.ask(0, 0, 2, 4)
        assert await_answers([made.desk], made.bell, 60.0) == [True]
        thread.join()
        assert got


def test_a_lost_rank_that_wakes_up_late_lands_nowhere():
    with ends(LAYOUT) as made:
        exchange(made, 3)
        made.desk.ask(0, 0, 600, 1200)
        message = made.outpost.next_message(60.0)
        before = but_beats(made)
        made.desk._mirror.close()  # as at the end of its connection; the memory may have another use now
        made.outpost.answered(message)
        until(lambda: made.outpost.ended is not None)
        assert "RDMA over rxb0" in made.outpost.ended
        assert but_beats(made) == before
        until(lambda: bool(made.ended))


def test_the_end_of_the_connection_fences_the_other_side():
    with ends(LAYOUT) as made:
        made.desk.ask(0, 0, 600, 1200)
        message = made.outpost.next_message(60.0)
        before = but_beats(made)
        made.outpost._wire.end()
        until(lambda: bool(made.ended))
        made.outpost.answered(message)
        time.sleep(0.3)
        assert but_beats(made) == before and not made.desk.idle


def test_a_link_that_goes_down_ends_the_connection_and_a_new_one_works():
    with ends(LAYOUT) as made:
        exchange(made, 3)
        sh("ip link set vb0 down")
        try:
            until(lambda: bool(made.ended) and made.outpost.ended is not None)
            assert "RDMA over rx" in f"{made.ended[0]} {made.outpost.ended}"
        finally:
            sh(
                "ip link set vb0 up;"
                "ip neigh replace 10.77.0.1 lladdr $(cat /sys/class/net/va0/address) dev vb0 nud permanent;"
                "ip neigh replace 10.77.0.2 lladdr $(cat /sys/class/net/vb0/address) dev va0 nud permanent"
            )
    with ends(LAYOUT) as made:
        exchange(made, 3)


def test_cards_that_do_not_reach_each_other_are_found_before_the_first_message(monkeypatch):
    """Connecting queue pairs sends nothing: only a write shows that it arrives."""
    monkeypatch.setattr(mirror, "PROBE_S", 1.0)
    sh("ip neigh replace 10.77.0.1 lladdr 02:00:00:00:00:99 dev vb0 nud permanent")
    try:
        near, asking, far, answering = meet(LAYOUT, "rxa0", "rxb0")
    finally:
        sh("ip neigh replace 10.77.0.1 lladdr $(cat /sys/class/net/va0/address) dev vb0 nud permanent")
    assert asking == answering and "RDMA over rxb0" in asking
    near.close()
    far.close()


def test_a_wrong_key_is_refused():
    one, other = (meeting.opened("rxe0", None, LAYOUT) for _ in range(2))
    try:
        one.connect(replace(other.side, key=other.side.key ^ 0x5A5A))
        other.connect(one.side)
        other.probe(ANSWERED_AT)
        with pytest.raises(Unusable, match="RDMA over rxe0"):
            one.probe(ASKED_AT)
    finally:
        one.discard()
        other.discard()


def test_memory_of_another_size_is_refused():
    one, other = meeting.opened("rxe0", None, LAYOUT), meeting.opened("rxe0", None, CODED)
    try:
        with pytest.raises(Unusable, match=r"the other side has .* bytes for messages"):
            one.connect(other.side)
    finally:
        one.discard()
        other.discard()


def test_a_device_that_is_not_there_is_named():
    assert "RDMA device mlx5_9: " in meeting.opened("mlx5_9", None, LAYOUT)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What tests/rdma/serve_ranks.py prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve_ranks.py")), str(tmp_path_factory.mktemp("ranks"))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,  # as tests/rdma/test_serving.py has it
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.mark.heavy  # a node and a rank with torch take minutes under emulation
@pytest.mark.timeout(1600)
def test_the_tokens_are_those_of_one_process_before_and_after_a_kill(served):
    for stage in ("whole", "lost", "back"):
        assert served[stage]["tokens"] == served["expected"], stage
    whole, lost, back = (served[stage]["experts"] for stage in ("whole", "lost", "back"))
    assert whole["remote"]["ways"] == back["remote"]["ways"] == {"1": "RDMA over rxa1"}
    assert 0 < whole["pairs_by_rank"][1] == lost["pairs_by_rank"][1] < back["pairs_by_rank"][1]
    assert "its connection has ended" in lost["masked"]["1"] and lost["times_masked"] == 1
    assert back["masked"] == {} and lost["remote"]["ways"] == {}
    told = [line for line in served["logs"]["prefill,decode.log"].splitlines() if "RDMA over rxa1" in line]
    assert len(told) == 2, "once for each connection"
    assert "RDMA over rxb1" in served["logs"]["rank.log"]
