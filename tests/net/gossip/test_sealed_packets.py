"""Sealed datagrams: only holders of a key read them, each is accepted once, and keys rotate without a gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.channel.keyring import Key, Keyring, parse
from net.gossip.sealed_packets import OVERHEAD_BYTES, WINDOW_PACKETS, PacketSeal, SealError, Window

A, B = Key(b"a" * 32), Key(b"b" * 32)
OLD, BOTH, NEW = Keyring((A,)), Keyring((B, A)), Keyring((B,))


def seal(number=1):
    return PacketSeal(bytes([number]) * 12)


@given(packets=st.lists(st.binary(max_size=1400), max_size=20))
def test_what_is_sealed_is_opened(packets):
    sender, receiver = seal(1), seal(2)
    for packet in packets:
        datagram = sender.seal(OLD, packet)
        assert len(datagram) == len(packet) + OVERHEAD_BYTES
        assert receiver.open(OLD, datagram) == packet


@given(packet=st.binary(min_size=1, max_size=200), data=st.data())
def test_a_changed_or_cut_packet_is_dropped_and_changes_nothing(packet, data):
    sender, receiver = seal(1), seal(2)
    datagram = sender.seal(OLD, packet)
    damaged = bytearray(datagram)
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    with pytest.raises(SealError):
        receiver.open(OLD, bytes(damaged))
    assert receiver.open(OLD, datagram) == packet


@given(st.binary(max_size=1500))
def test_bytes_of_strangers_are_dropped(datagram):
    with pytest.raises(SealError):
        seal().open(OLD, datagram)


@given(counters=st.lists(st.integers(0, 3 * WINDOW_PACKETS), max_size=200))
def test_the_window_accepts_every_recent_counter_once(counters):
    window, seen, top = Window(), set(), -1
    for counter in counters:
        accepted = window.accept(counter)
        assert accepted == (counter not in seen and counter > top - WINDOW_PACKETS)
        seen.add(counter)
        top = max(top, counter)


def test_replays_are_dropped_per_sender():
    one, two, receiver = seal(1), seal(2), seal(3)
    first = one.seal(OLD, b"first")
    assert receiver.open(OLD, first) == b"first"
    assert receiver.open(OLD, two.seal(OLD, b"other")) == b"other"  # the same counter, another session
    with pytest.raises(SealError, match="replayed"):
        receiver.open(OLD, first)


def test_rotation_has_no_gap():
    """Every step of the rotation on one node, while the other is still at the step before."""
    for ours, theirs in ((OLD, Keyring((A, B))), (Keyring((A, B)), BOTH), (BOTH, NEW)):
        one, two = seal(1), seal(2)
        assert two.open(theirs, one.seal(ours, b"x")) == b"x"
        assert one.open(ours, two.seal(theirs, b"y")) == b"y"
    with pytest.raises(SealError, match="other key"):
        seal(2).open(NEW, seal(1).seal(OLD, b"x"))


def test_the_file_of_keys():
    ring = parse(f"# the cluster\n{'ab' * 32}  # primary\n\n{'cd' * 32}\n")
    assert [key.secret for key in ring.keys] == [b"\xab" * 32, b"\xcd" * 32]
    assert ring.primary.id != ring.keys[1].id and "ab" * 32 not in repr(ring)
    for text, why in (
        ("", "0 keys"),
        ("zz", "line 1"),
        ("ab" * 31, "line 1"),
        (f"{'ab' * 32}\n" * 2, "line 2 repeats"),
    ):
        with pytest.raises(ValueError, match=why):
            parse(text)
