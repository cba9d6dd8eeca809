"""A device of which the verbs fail: the fake's events arrive over pipes, as the card's do over its descriptors."""

import asyncio
import errno
import os
from types import SimpleNamespace

import pytest

from net.loop.tasks import FINAL, TASK
from net.transfer.common.transport import Unusable
from net.transfer.rdma import card as cards
from net.transfer.rdma.device import Device
from net.transfer.rdma.verbs import COMPLETION, Verbs, VerbsError
from tests.net.peers import until


class FakeVerbs(Verbs):
    """One card with one address. `polled`: what each poll of a queue returns; `armed`: what each request for an event
    returns."""

    def __init__(self, channel: int, events: int) -> None:
        self.polled = self.armed = self.polls = 0
        self.records: list[bytes] = []
        """Completions of the next poll."""
        self.closed: list[object] = []
        gid = SimpleNamespace(gid_index=0, port_num=cards.PORT, gid=SimpleNamespace(raw=bytes(16)), gid_type=1)
        fields = SimpleNamespace(max_cqe=64, max_cq=4, state=1)
        made = {"int *": [1], "struct ibv_gid_entry[]": [gid]}
        self.ffi = SimpleNamespace(
            new=lambda kind, *_: made.get(kind, fields),
            string=bytes,
            NULL=None,
            errno=errno.EIO,
            buffer=lambda *_: b"".join(self.records.pop(0) for _ in list(self.records)),
        )
        self.lib = SimpleNamespace(
            IBV_GID_TYPE_ROCE_V2=1,
            ibv_get_device_list=lambda count: [b"card"],
            ibv_free_device_list=lambda found: None,
            ibv_get_device_name=lambda found: found,
            ibv_open_device=lambda found: SimpleNamespace(async_fd=events),
            ibv_query_device=lambda *_: 0,
            ibv_query_port=lambda *_: 0,
            ibv_query_gid_table=lambda *_: 1,
            ibv_alloc_pd=lambda context: "pd",
            ibv_create_comp_channel=lambda context: SimpleNamespace(fd=channel),
            ibv_create_cq=lambda *_: "cq",
            ibv_req_notify_cq=lambda *_: self.armed,
            kv_nonblocking=lambda fd: 0,
            kv_drain_events=lambda made: os.read(channel, 100),
            kv_poll=self._poll,
            ibv_close_device=self.closed.append,
            ibv_dealloc_pd=self.closed.append,
            ibv_destroy_comp_channel=self.closed.append,
        )

    def _poll(self, *_: object) -> int:
        self.polls += 1
        return len(self.records) or self.polled


@pytest.fixture
def card(monkeypatch):
    """(its verbs, a descriptor: a byte written to it is an event of a completion queue)"""
    channel, bell = os.pipe()
    events, unused = os.pipe()
    fake = FakeVerbs(channel, events)
    monkeypatch.setattr(cards, "verbs", lambda: fake)
    yield fake, bell
    for fd in (channel, bell, events, unused):
        os.close(fd)


@pytest.mark.parametrize(("polled", "armed"), [(-1, 0), (0, errno.EIO)])
async def test_a_node_whose_completion_queue_is_broken_leaves(card, polled, armed):
    """Every transfer over it would wait for ever, while the node looks healthy."""
    verbs, bell = card
    loop, reports = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    device = Device("card")
    try:
        number, _ = device.take_completions(8)
        os.write(bell, b"1")
        await until(lambda: verbs.polls)
        assert not reports and device.poll() == 0
        verbs.polled, verbs.armed = polled, armed
        for _ in range(3):
            before = verbs.polls
            os.write(bell, b"1")
            await until(lambda before=before: verbs.polls > before)
        [report] = reports
        assert (report[TASK], report[FINAL]) == ("completions of card", True)
        assert isinstance(report["exception"], VerbsError)
        if polled:
            with pytest.raises(VerbsError, match="a completion queue of card is broken"):
                device.poll()
        device.give_back_completions(number, 8)  # a link ends, whatever its device does
    finally:
        loop.remove_reader(device.completions_fd)
        loop.remove_reader(device.events_fd)
        loop.set_exception_handler(None)


async def test_a_handler_that_raises_makes_the_node_leave(card):
    """The completions behind it are lost, so transfers would wait for ever."""
    verbs, bell = card
    loop, reports = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    device = Device("card")
    try:
        device.take_completions(8)
        seen = []

        def wrong(completion):
            seen.append(completion)
            raise ZeroDivisionError("my handler")

        device.handlers[7] = wrong
        verbs.records = [COMPLETION.pack(number, 0, 7) for number in range(2)]
        os.write(bell, b"1")
        await until(lambda: reports)
        assert len(seen) == 1 and reports[0].get(FINAL) is True
        assert isinstance(reports[0]["exception"], ZeroDivisionError)
    finally:
        loop.remove_reader(device.completions_fd)
        loop.remove_reader(device.events_fd)
        loop.set_exception_handler(None)


def test_a_card_that_cannot_be_used_is_closed(card):
    """A rank of the experts whose card has no address tries again every second."""
    verbs, _ = card
    with pytest.raises(Unusable, match="GID of index 5"):
        cards.Card("card", gid_index=5)
    assert len(verbs.closed) == 1, "the context"
    verbs.lib.kv_nonblocking = lambda fd: errno.EBADF
    with pytest.raises(Unusable, match="fcntl"):
        cards.Card("card")
    assert len(verbs.closed) == 4 and verbs.closed[2] == "pd", "the channel, the protection domain, the context"
