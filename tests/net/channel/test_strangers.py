"""Who connects and says nothing: it costs a node next to no memory, goes soon, and keeps nobody else out."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import AsyncExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.channel.channel import Channel
from net.channel.cluster_key import ClusterKey
from net.channel.connection import HELLO_MAX
from net.channel.doorstep import MAX_WAITING_PER_ADDRESS, Doorstep
from net.channel.wire import MAGIC, PREFIX, VERSION, Decoder, allocate, encode

SILENT = 300
PER_STRANGER = 16 << 10
"""Bytes of Python objects that one may cost: buffers of 64 KB and more show at once."""

PROMISE = PREFIX.pack(MAGIC, VERSION, 60_000, 0)
"""The first bytes of a hello that would be 60,000 long."""


def key_of(tmp_path) -> ClusterKey:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    return ClusterKey(path)


@pytest.mark.parametrize("said", [b"", b"M", PROMISE])
@pytest.mark.parametrize("with_key", [False, True])
async def test_silent_connections_cost_little_and_keep_nobody_out(tmp_path, with_key, said):
    key = key_of(tmp_path) if with_key else None
    node, other = Channel("node", {}, cluster_key=key), Channel("other", {}, cluster_key=key)
    address = await node.start("127.0.0.1")
    await other.start("127.0.0.1")
    if with_key and said:
        said = b"Mk3y\x01"[: len(said)]
    try:
        async with AsyncExitStack() as stack:
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            readers = []
            for _ in range(SILENT):
                reader, writer = await asyncio.open_connection(*address)
                stack.callback(writer.close)
                writer.write(said)
                readers.append(reader)
            await asyncio.sleep(0.1)
            cost = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert cost < SILENT * PER_STRANGER, f"{cost / SILENT:.0f} bytes each, with the client's end"
            for reader in readers[: SILENT - MAX_WAITING_PER_ADDRESS]:
                with suppress(ConnectionError):
                    assert await reader.read() == b"", "those that waited longest were let go"
            assert await other.connect(address) == "node", "and a peer that says hello gets in"
    finally:
        await other.close()
        await node.close()


def test_a_header_gets_the_memory_that_it_has_filled():
    decoder = Decoder(allocate(1024), HELLO_MAX, 2048)
    view = decoder.buffer()
    view[: len(PROMISE)] = PROMISE
    assert list(decoder.received(len(PROMISE))) == []
    assert len(decoder.buffer()) <= 4096, "a prefix that promises 60,000 bytes is no reason to take them"


@pytest.mark.parametrize("size", [1, 100, 2048, 5000, 60_000])
@pytest.mark.parametrize("piece", [1 << 20, 700])
def test_hellos_of_any_length_are_read(size, piece):
    decoder = Decoder(allocate(1024), HELLO_MAX, 2048)
    data, frames = memoryview(encode({"a": "x" * size}) + encode({"b": 1})), []
    while data:
        into = decoder.buffer()
        count = min(len(into), len(data), piece)
        into[:count] = data[:count]
        data = data[count:]
        for frame in decoder.received(count):
            frames.append(frame.header)
            decoder.widen()
    assert frames == [{"a": "x" * size}, {"b": 1}]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_no_address_and_no_crowd_takes_more_than_its_places(steps):
    step: Doorstep[int] = Doorstep(most=6, most_of_address=3)
    inside: dict[int, str] = {}
    for number, (address, leaves) in enumerate(steps):
        if leaves and inside:
            gone = next(iter(inside))
            step.leave(gone)
            step.leave(gone)
            del inside[gone]
            continue
        goes = step.enter(number, str(address))
        if goes is not None:
            same = [one for one, its in inside.items() if its == str(address)]
            assert goes == (same[0] if len(same) == 3 else next(iter(inside)))
            del inside[goes]
        inside[number] = str(address)
        assert len(step) == len(inside) <= 6
        assert max(map(list(inside.values()).count, inside.values())) <= 3
