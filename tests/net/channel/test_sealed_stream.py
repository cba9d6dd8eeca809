"""Sealed connections: what arrives is what was sent, nothing else is accepted, keys rotate, refusals say why."""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from net.channel.channel import Channel, PeerRefused
from net.channel.cluster_key import ClusterKey, KeyFileError
from net.channel.keyring import Key, Keyring
from net.channel.sealed_stream import RECORD_MAX, SealedStream
from net.channel.wire import Decoder, FrameError, allocate, encode, head
from net.errors import ONE_KEY, OTHER_KEY

A, B = Key(b"a" * 32), Key(b"b" * 32)
ONLY_A = Keyring((A,))


class Pair:
    """Two ends after their greetings; what they send is carried by hand."""

    def __init__(self, ours=ONLY_A, theirs=ONLY_A, seed=0):
        self.dialer = SealedStream(ours, True, bytes([seed + 1]) * 32)
        self.acceptor = SealedStream(theirs, False, bytes([seed + 2]) * 32)
        self.decoders = {end: Decoder(allocate()) for end in (self.dialer, self.acceptor)}
        assert self.feed(self.acceptor, self.dialer.greeting()) == []
        assert self.feed(self.dialer, self.acceptor.answer) == []
        assert self.dialer.ready and self.acceptor.ready

    def feed(self, end, data, pieces=()):
        frames, data = [], memoryview(data)
        for size in (*pieces, len(data)):
            while size and data:
                room = end.buffer()
                count = min(len(room), size, len(data))
                room[:count] = data[:count]
                data, size = data[count:], size - count
                frames += [(f.header, b"".join(f.payload)) for f in end.frames(count, self.decoders[end])]
        return frames


@settings(max_examples=40, deadline=None)
@given(
    payloads=st.lists(st.lists(st.integers(0, 2 * RECORD_MAX + 5), max_size=3), min_size=1, max_size=3),
    pieces=st.lists(st.integers(1, 70_000), max_size=8),
)
def test_frames_arrive_however_they_are_cut(payloads, pieces):
    pair, sent, wire = Pair(), [], []
    for number, sizes in enumerate(payloads):
        views = [memoryview(os.urandom(size)) for size in sizes]
        sent.append(({"n": number}, b"".join(views)))
        wire += pair.dialer.seal([head({"n": number}, sum(sizes)), *views])
    assert pair.feed(pair.acceptor, b"".join(wire), pieces) == sent


@settings(deadline=None)
@given(data=st.data())
def test_changed_repeated_or_swapped_records_are_refused(data):
    pair = Pair()
    records = [b"".join(pair.dialer.seal([encode({"n": n}, [b"x" * 50])])) for n in range(3)]
    match data.draw(st.sampled_from(("change", "repeat", "swap", "drop", "reflect", "another connection"))):
        case "change":
            damaged = bytearray(records[0])
            damaged[data.draw(st.integers(4, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
            records[0] = bytes(damaged)
        case "repeat":
            records[1] = records[0]
        case "swap":
            records[0], records[1] = records[1], records[0]
        case "drop":
            del records[0]
        case "reflect":
            records[0] = b"".join(pair.acceptor.seal([encode({"n": 0})]))
        case _:
            pair = Pair(seed=10)
    with pytest.raises(FrameError, match="not sealed with"):
        pair.feed(pair.acceptor, b"".join(records))


@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_noise_is_an_error_or_waits_for_more(noise, dialed):
    end = SealedStream(Keyring((A,)), dialed, b"\1" * 32)
    end.buffer()[: len(noise)] = noise
    with suppress(FrameError):
        assert list(end.frames(len(noise), Decoder(allocate()))) == []
    assert not end.ready or noise.startswith(b"Mk3y")


def test_other_threads_run_while_a_record_is_encrypted_or_decrypted():
    """With a switch interval longer than the test, another thread counts only while the cipher holds no lock."""
    cipher, plain = AESGCM(b"k" * 32), bytes(16 << 20)
    sealed, opened = cipher.encrypt(b"n" * 12, plain, None), bytearray(len(plain))
    count = [0]
    ended = threading.Event()

    def tick():
        while not ended.is_set():
            count[0] += 1
            time.sleep(0)

    def counted(work):
        before = count[0]
        work()
        return count[0] > before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    other = threading.Thread(target=tick)
    other.start()
    try:
        for work in (
            lambda: cipher.encrypt(b"n" * 12, plain, None),
            lambda: cipher.decrypt_into(b"n" * 12, sealed, None, opened),
        ):
            assert any(counted(work) for _ in range(200))
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        other.join()


def test_a_key_that_only_one_side_sends_with_is_enough():
    for ours, theirs in (((A,), (B, A)), ((B, A), (A, B)), ((A, B), (B,))):
        pair = Pair(Keyring(ours), Keyring(theirs))
        assert pair.feed(pair.dialer, b"".join(pair.acceptor.seal([encode({"n": 1})]))) == [({"n": 1}, b"")]


# --- over sockets


def key_file(directory: Path, *secrets: str) -> Path:
    path = directory / f"key{len(list(directory.iterdir()))}"
    path.write_text("".join(f"{secret * 32}\n" for secret in secrets))
    path.chmod(0o600)
    return path


async def node(name: str, path: Path | None):
    channel = Channel(name, {}, cluster_key=None if path is None else ClusterKey(path))

    async def echo(peer_id, body, data):
        return body, [data]

    channel.handle("echo", echo)
    await channel.start("127.0.0.1")
    return channel


@pytest.mark.parametrize("ours, theirs, why", [("aa", None, ONE_KEY), (None, "aa", ONE_KEY), ("aa", "bb", OTHER_KEY)])
async def test_other_keys_are_refused_with_a_reason_on_both_sides(tmp_path, caplog, ours, theirs, why):
    a, b = [await node(n, k and key_file(tmp_path, k)) for n, k in (("a", ours), ("b", theirs))]
    with pytest.raises(PeerRefused, match=why):
        await a.connect(b.links.address)
    assert [r for r in caplog.records if why in r.getMessage()], "the other side logs it"
    await a.close()
    await b.close()


async def test_calls_over_a_sealed_channel_while_the_key_rotates(tmp_path, monkeypatch):
    monkeypatch.setattr("net.channel.cluster_key.CHECK_PERIOD_S", 0.0)
    path = key_file(tmp_path, "aa")
    a = await node("a", path)
    payload = os.urandom(300_000)
    for number, keys in enumerate((("aa",), ("aa", "bb"), ("bb", "aa"), ("bb",))):
        b = await node(f"b{number}", key_file(tmp_path, *keys))
        peer = await b.connect(a.links.address)
        _, data = await b.call(peer, "echo", {}, [payload])
        assert data == payload
        await b.close()
        path.write_text("".join(f"{key * 32}\n" for key in keys) + "# read again\n")
    stranger = await node("c", key_file(tmp_path, "aa"))
    with pytest.raises(PeerRefused, match="no cluster key in common"):
        await stranger.connect(a.links.address)
    await stranger.close()
    await a.close()


async def test_nothing_of_a_call_is_readable_on_the_wire(tmp_path):
    """A tap between two nodes sees none of their words."""
    path, seen, taps = key_file(tmp_path, "aa"), bytearray(), []
    a, b = await node("a", path), await node("b", path)

    async def tap(reader, writer):
        taps.append(asyncio.current_task())
        there, back = await asyncio.open_connection(*b.links.address)

        async def pump(source, sink):
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(tap, "127.0.0.1")
    peer = await a.connect(server.sockets[0].getsockname()[:2])
    body, _ = await a.call(peer, "echo", {"word": "plaintext"}, [b"plaintext" * 100])
    assert body == {"word": "plaintext"} and len(seen) > 1000
    assert b"plaintext" not in seen and b"MOON" not in seen and b"echo" not in seen
    await a.close()
    await b.close()
    server.close()
    await asyncio.gather(*taps)


@pytest.mark.expects_error("keeping the old cluster keys")
def test_the_key_file_says_what_is_wrong(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("net.channel.cluster_key.CHECK_PERIOD_S", 0.0)
    with pytest.raises(KeyFileError, match="No such file"):
        ClusterKey(tmp_path / "none")
    path = key_file(tmp_path, "aa")
    key = ClusterKey(path)
    before = key.ring()
    path.write_text("rubbish")
    assert key.ring() == before
    path.chmod(0o644)
    path.write_text("cc" * 32)
    assert key.ring().primary.secret == b"\xcc" * 32
    ClusterKey(path)
    assert "chmod 600" in caplog.text
