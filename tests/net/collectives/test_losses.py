"""Who counts as lost: ranks over sockets whose messages are slow, or never end. The ranks are threads here."""

from __future__ import annotations

import ctypes
import socket
import threading
import time

import pytest

from net.collectives.epochs import GroupOptions
from net.collectives.errors import RanksGone
from net.collectives.group import RankGroup
from net.collectives.link import HEAD, USER

SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it


class Store(dict):
    """What ranks use of torch's store."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def delete_key(self, key):
        self.pop(key, None)


class Ranks:
    """Groups over TCP in one process."""

    def __init__(self, size, **options):
        store, self.groups = Store(), {}
        chosen = GroupOptions(shares_memory=False, **options)
        self.each(range(size), lambda rank: self.groups.update({rank: RankGroup(store, rank, size, chosen)}))

    @staticmethod
    def each(ranks, call):
        """`call(rank)` on all ranks at once; the results, or errors, by rank."""
        results = {}

        def run(rank):
            try:
                results[rank] = call(rank)
            except RanksGone as error:
                results[rank] = error

        threads = {rank: threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks}
        for thread in threads.values():
            thread.start()
        for thread in threads.values():
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads.values()), "a call does not end"
        return results

    def link(self, rank, other):
        return self.groups[rank]._peers.links[other]


@pytest.fixture
def ranks():
    made = []

    def make(size, **options):
        made.append(Ranks(size, **options))
        return made[-1]

    yield make
    for one in made:
        one.each(one.groups, lambda rank, one=one: one.groups[rank].close())


def pace(link, bytes_per_s):
    link._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)


def test_a_rank_whose_message_moves_is_not_late(ranks):
    three, memory = (
        ranks(3, timeout_s=2.0),
        [ctypes.create_string_buffer(bytes([rank]) * (5 << 20)) for rank in (1, 2, 3)],
    )
    pace(three.link(0, 1), 1 << 20)
    began = time.monotonic()
    ended = three.each(
        three.groups, lambda rank: three.groups[rank].broadcast(ctypes.addressof(memory[rank]), 5 << 20, 0)
    )
    assert time.monotonic() - began > 3, "no message was slow"
    assert ended == dict.fromkeys(range(3)) and memory[1].raw == memory[0].raw


def test_only_the_rank_that_does_not_come_is_late(ranks):
    three = ranks(3, timeout_s=2.0, on_loss="shrink")
    ended = three.each((1, 2), lambda rank: three.groups[rank].barrier())
    assert [error.ranks for error in ended.values()] == [(0,), (0,)]
    assert three.each((1, 2), lambda rank: three.groups[rank].barrier()) == {1: None, 2: None}


def test_survivors_whose_messages_move_keep_each_other(ranks):
    three, nbytes = ranks(3, timeout_s=2.0, on_loss="shrink"), 10 << 20
    memory = [ctypes.create_string_buffer(nbytes) for _ in range(2)]
    for one, other in ((0, 1), (1, 0)):
        pace(three.link(one, other), 1 << 20)

    def run(rank):
        if rank == 2:
            while not (three.link(0, 1).progressed_ns and three.link(1, 0).progressed_ns):
                time.sleep(0.01)
            for other in (0, 1):
                three.link(2, other)._sock.shutdown(socket.SHUT_RDWR)
        else:
            address = ctypes.addressof(memory[rank])
            three.groups[rank].all_reduce(address, address, nbytes // 4, "float32", "sum")

    ended = three.each(three.groups, run)
    assert [ended[rank].ranks for rank in (0, 1)] == [(2,), (2,)]
    assert three.each((0, 1), lambda rank: three.groups[rank].barrier()) == {0: None, 1: None}
    assert [three.groups[rank].members for rank in (0, 1)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("source", [0, None])
def test_a_receive_ends_although_its_message_does_not(ranks, source):
    two, memory = ranks(2, timeout_s=0.5), ctypes.create_string_buffer(1000)
    ticket, give_up = two.groups[1].receive(ctypes.addressof(memory), 1000, source, 7)
    two.link(0, 1)._sock.sendall(HEAD.pack(USER, 7, 1000, 0) + bytes(500))
    while not two.link(1, 0).progressed_ns:
        time.sleep(0.01)

    def run(rank):
        give_up()
        ticket.wait()

    ended = two.each([1], run)[1]
    assert ended.ranks == (0,) and "in the middle of a message" in str(ended)
    assert two.groups[1].gone() == [0]


def test_a_receive_that_gave_up_gets_a_message_that_moves(ranks):
    two, nbytes = ranks(2, timeout_s=2.0), 3 << 20
    given, memory = ctypes.create_string_buffer(b"x" * nbytes), ctypes.create_string_buffer(nbytes)
    pace(two.link(0, 1), 1 << 20)
    ticket, give_up = two.groups[1].receive(ctypes.addressof(memory), nbytes, 0, 7)
    two.groups[0].send(ctypes.addressof(given), nbytes, 1, 7)
    while not two.link(1, 0).progressed_ns:
        time.sleep(0.01)
    two.each([1], lambda rank: give_up())
    assert ticket.ended() and ticket.error is None and ticket.source == 0 and memory.raw == given.raw[:nbytes]


def test_a_connection_between_hosts_ends_with_the_other_host(ranks):
    """A host that vanishes sends no end: the kernel has to ask, and to give up at the timeout."""
    sock = ranks(2, timeout_s=8.0).link(0, 1)._sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
