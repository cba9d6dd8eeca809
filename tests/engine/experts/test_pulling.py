"""Experts that are pulled from ranks elsewhere: never wrong or torn ones, and from where else if a rank is lost."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.experts import pulling
from engine.experts.joining import Welcome
from engine.experts.placing.placement import first_placement
from engine.experts.plan import Plan
from engine.experts.pulling import CHECKPOINT, RANKS, Lender, Sources, checksum, cut, paste
from engine.experts.share import Share
from engine.model.model_error import ModelError
from net.channel.keyring import Keyring
from net.channel.wire import FrameError
from net.errors import PeerLost
from net.rounds.desk import Desk, desk_bytes, new_bell
from net.rounds.frame_socket import FrameSocket
from net.rounds.layout import Layout
from net.rounds.outpost import Outpost, pulled
from net.rounds.remote_desk import RemoteDesk
from net.transfer.common.memory import Region
from tests.net.rounds.test_remote_desk import RING, connected

LAYOUT = Layout(most_rows=8, hidden=16, top_k=2, dtype="float32")
PLAN = Plan((0, 1), 4, 3, 4, 16, 8, "silu", LAYOUT, remote=2)
WELCOME = Welcome(1, "a model", PLAN, first_placement(2, 4, 3, 12, 3))
BOOK = {(layer, slot): expert for layer, slot, expert in WELCOME.duty.experts}
NBYTES = 4 * PLAN.expert_elements


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_parts_are_as_pieces_of_the_whole(seed):
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 5))]
    whole = os.urandom(sum(sizes))
    parts, left = [memoryview(bytearray(size)) for size in sizes], whole
    piece = rng.randrange(1, len(whole) + 2)
    for at in range(0, len(whole), piece):
        paste(parts, at, memoryview(whole)[at : at + piece])
        left = left[piece:]
    assert b"".join(parts) == whole
    for _ in range(10):
        at, nbytes = rng.randrange(len(whole) + 2), rng.randrange(1, len(whole) + 2)
        assert cut(parts, at, nbytes) == whole[at : at + nbytes]


def random_share() -> Share:
    """Whose slots are all different."""
    region = Region.private("share", PLAN.share_bytes)
    region.memory[:] = torch.rand(PLAN.share_bytes // 4).numpy().tobytes()
    return Share(region, PLAN)


def test_only_an_expert_that_is_there_is_lent():
    share = random_share()
    lender = Lender(WELCOME, share, BOOK)
    expert = BOOK[1, 2]
    given = lender.give([1, 2, expert], 8, 100)
    assert given is not None and given[0] == cut(share.bytes_of(1, 2), 8, 100)
    assert given[1] == checksum("a model", 1, expert, [given[0]], 8)
    other = (expert + 1) % 4
    wrong = [([1, 2, other], 0, 8), ([2, 0, 0], 0, 8), ([1, -1, 0], 0, 8), ([1, 2], 0, 8), ([1, 2, expert], -8, 16)]
    sizes = [(0, 0), (0, -1), (NBYTES - 7, 8), (NBYTES, 1), (0, pulling.PIECE + 1)]
    for name, at, nbytes in [*wrong, *(([1, 2, expert], *size) for size in sizes)]:
        assert lender.give(name, at, nbytes) is None


def test_a_checksum_is_of_the_bytes_and_of_what_they_are():
    view = memoryview(b"weights of an expert")
    found = {
        checksum(*of)
        for of in [
            ("a", 1, 2, [view]),
            ("b", 1, 2, [view]),
            ("a", 2, 2, [view]),
            ("a", 1, 3, [view]),
            ("a", 1, 2, [view], 8),
            ("a", 1, 2, [view[1:]]),
        ]
    }
    assert len(found) == 6 and all(0 <= one < 1 << 63 for one in found)
    assert checksum("a", 1, 2, [view[:3], view[3:]]) == checksum("a", 1, 2, [view])


@pytest.mark.parametrize(
    "header",
    [
        {"pull": 1, "name": [0, 0, 0], "at": 0},
        {"pull": 1, "name": [0, 0, "0"], "at": 0, "n": 8},
        {"pull": "1", "name": [0, 0, 0], "at": 0, "n": 8},
        {"pull": 1, "name": 3, "at": 0, "n": 8},
    ],
)
def test_a_frame_that_pulls_nothing_is_none(header):
    with pytest.raises(FrameError, match="pulls nothing that has a name"):
        pulled(Lender(WELCOME, random_share(), BOOK).give, header)


class Elsewhere:
    """A rank elsewhere, which lends its experts. `before`: called before it gives a piece."""

    def __init__(self, share: Share, ring: Keyring | None = None) -> None:
        near, far = connected(ring, ring)
        assert isinstance(near, FrameSocket) and isinstance(far, FrameSocket)
        self.lender = Lender(WELCOME, share, dict(BOOK))
        self.given = 0
        self.before: Callable[[], None] = lambda: None
        self.bell, self.ended = new_bell("bell"), list[str]()
        self.outpost = Outpost(far, LAYOUT, give=self.give).__enter__()
        self.desk = RemoteDesk(near, LAYOUT, self.bell, self.ended.append)

    def give(self, name: list[int], at: int, nbytes: int) -> tuple[memoryview, int] | None:
        self.before()
        self.given += 1
        return self.lender.give(name, at, nbytes)

    def close(self) -> None:
        self.desk.close()
        self.outpost.__exit__()
        self.bell.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Elsewhere]]:
    monkeypatch.setattr(pulling, "PIECE", NBYTES // 3 - 5)  # 4 pieces
    made: list[Elsewhere] = []

    def rank(share: Share, ring: Keyring | None = None) -> Elsewhere:
        made.append(Elsewhere(share, ring))
        return made[-1]

    yield rank
    for one in made:
        one.close()


def whole(share: Share, layer: int = 0, slot: int = 0) -> bytes:
    return b"".join(share.bytes_of(layer, slot))


def sources() -> Sources:
    """Whose checkpoint cannot be read."""
    source: Any = SimpleNamespace(fingerprint="a model", format="gone")
    return Sources(PLAN, source)


def unreadable(*given: Any) -> None:
    raise ModelError("no such file")


@pytest.mark.parametrize("ring", [None, RING], ids=["clear", "sealed"])
def test_an_expert_comes_in_pieces_while_a_message_is_open(elsewhere, ring):
    share = random_share()
    rank = elsewhere(share, ring)
    rank.desk.ask(0, 0, 8, 16)
    with sources().opened() as bring:
        for layer, slot in BOOK:
            found, origin = bring(layer, BOOK[layer, slot], [(rank.desk, slot)])
            assert whole(found) == whole(share, layer, slot) and origin == RANKS
    message = rank.outpost.next_message(30)
    assert message is not None and rank.given == 4 * len(BOOK) and not rank.ended
    rank.outpost.answered(message)


def test_a_rank_that_is_lost_in_the_middle_is_replaced_by_a_copy_and_then_by_the_checkpoint(elsewhere, monkeypatch):
    share = random_share()
    ranks = [elsewhere(share) for _ in range(2)]
    copies, expert = [(rank.desk, 0) for rank in ranks], BOOK[0, 0]

    def end_after_a_piece() -> None:
        if ranks[0].given == 1:
            ranks[0].outpost._wire.end()

    ranks[0].before = end_after_a_piece
    found, read = sources(), list[int]()
    with found.opened() as bring:
        brought = bring(0, expert, copies)
        assert whole(brought.share) == whole(share) and brought.origin == RANKS
        assert ranks[0].given == 2 and ranks[1].given == 4 and ranks[0].ended
        ranks[1].outpost._wire.end()
        monkeypatch.setattr(pulling, "open_weights", lambda *given: unreadable())
        with pytest.raises(ModelError, match="no such file"):
            bring(0, expert, copies)
    lone = random_share()
    monkeypatch.setattr(pulling, "open_weights", lambda *given: nullcontext(object()))
    monkeypatch.setattr(pulling, "lone_expert", lambda plan, reader, layer, one: read.append(one) or lone)
    with found.opened() as bring:
        assert bring(0, expert, copies) == (lone, CHECKPOINT) and read == [expert]


@pytest.mark.parametrize("at", [0, NBYTES // 2, NBYTES - 1])
def test_a_damaged_piece_is_not_used(elsewhere, at, monkeypatch):
    share, damaged = random_share(), random_share()
    ranks = [elsewhere(damaged), elsewhere(share)]
    give = ranks[0].lender.give

    def flips(name: list[int], begin: int, nbytes: int) -> tuple[memoryview, int] | None:
        given = give(name, begin, nbytes)
        assert given is not None
        if begin <= at < begin + nbytes:
            given[0][at - begin] ^= 16
        return given

    monkeypatch.setattr(ranks[0].lender, "give", flips)
    with sources().opened() as bring:
        assert whole(bring(0, BOOK[0, 0], [(rank.desk, 0) for rank in ranks]).share) == whole(share)
    assert ranks[1].given == 4 and not ranks[0].ended


def test_an_expert_that_changes_in_the_middle_is_not_used(elsewhere):
    """The slot gets another one between two pieces."""
    changed, share = random_share(), random_share()
    ranks = [elsewhere(changed), elsewhere(share)]

    def change() -> None:
        if ranks[0].given == 1:
            with ranks[0].lender.changing:
                changed.copy(0, 0, share, 1)
                ranks[0].lender._experts[0, 0] = BOOK[0, 1]  # type: ignore[index]

    ranks[0].before = change
    with sources().opened() as bring:
        assert whole(bring(0, BOOK[0, 0], [(rank.desk, 0) for rank in ranks]).share) == whole(share)
    assert ranks[0].given == 2 and ranks[1].given == 4


def test_a_rank_that_is_silent_is_asked_once_and_what_it_says_later_is_not_used(elsewhere):
    share, other = random_share(), random_share()
    ranks, goes_on = [elsewhere(other), elsewhere(share)], threading.Event()
    ranks[0].outpost._stop.set()  # no beats any more
    ranks[0].before = lambda: goes_on.wait(60) and None
    copies = [(rank.desk, 0) for rank in ranks]
    with sources().opened() as bring:
        for _ in range(2):
            assert whole(bring(0, BOOK[0, 0], copies).share) == whole(share)
    assert ranks[0].given == 0 and ranks[1].given == 8 and not ranks[0].ended
    goes_on.set()
    with sources().opened() as bring:  # the answer to the first question comes before that to the second one
        assert whole(bring(0, BOOK[0, 0], copies).share) == whole(other)


def test_a_rank_that_has_not_joined_lends_nothing():
    desk = Desk(Region.private("desk", desk_bytes(LAYOUT)), LAYOUT)
    assert sources().pulled(0, 0, [(desk, 0)], set()) is None
    desk.close()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_rank_uses_no_damaged_expert_of_a_move(damaged):
    share, sent = random_share(), random_share()
    lender = Lender(WELCOME, share, BOOK)
    expert, before = 3, whole(share, 1, 2)
    told = sources().checksum(1, expert, sent.bytes_of(0, 0))
    with pytest.raises(PeerLost, match="expert 3 of layer 1 came damaged"):
        lender.check(1, 2, expert, told)  # nothing came
    share.room(1, 2)
    share._staged[1, 2] = [part[0, 0].clone() for part in sent._parts]
    if not damaged:
        lender.check(1, 2, expert, told)
        share.commit()
        assert whole(share, 1, 2) == whole(sent)
        return
    share._staged[1, 2][1][3, 3] += 1
    with pytest.raises(PeerLost, match="expert 3 of layer 1 came damaged"):
        lender.check(1, 2, expert, told)
    assert whole(share, 1, 2) == before
