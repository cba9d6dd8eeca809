"""Channels over real sockets: calls, posts, order, errors, deadlines, loss, the end."""

import asyncio
import gc
import logging
import tracemalloc

import pytest

from net.channel import wire
from net.channel.channel import PeerLost, RemoteError
from net.channel.wire import STAGING_BYTES, Frame
from tests.net.peers import channels, echo, open_fds, settled_fds, until


async def test_call_carries_body_and_data_both_ways():
    async with channels("a", "b") as (a, b):
        b.handle("echo", echo)
        a.handle("echo", echo)
        body, data = await a.call("b", "echo", {"x": [1, None, "é"]}, [b"one", memoryview(b"two")])
        assert body == {"from": "a", "x": [1, None, "é"]}
        assert bytes(data) == b"onetwo!"
        assert (await b.call("a", "echo", {}))[0] == {"from": "b"}
        assert len(b.links._everyone) == 1, "both directions share one connection"


async def test_megabytes_of_data():
    async with channels("a", "b") as (a, b):
        b.handle("echo", echo)
        payload = bytes(range(256)) * 40000
        _, data = await a.call("b", "echo", {}, [payload])
        assert bytes(data) == payload + b"!"


async def test_a_node_calls_itself():
    async with channels("a") as (a,):
        a.handle("echo", echo)
        body, data = await a.call("a", "echo", {"x": (1, 2)}, [b"z"])
        assert body == {"from": "a", "x": [1, 2]}
        assert bytes(data) == b"z!"
        with pytest.raises(RemoteError, match="does not handle"):
            await a.call("a", "nothing", {})
        assert not a.links._everyone
        assert await a.connect(a.links.address) == "a"


async def test_messages_start_in_the_order_they_were_sent():
    seen = []

    async def note(peer_id, body, data):
        seen.append(body["n"])

    async with channels("a", "b") as (a, b):
        b.handle("note", note)
        for n in range(50):
            a.post("b", "note", {"n": n})
        await a.call("b", "note", {"n": 50})
        for n in range(51, 60):
            a.post("b", "note", {"n": n})
        await a.call("b", "note", {"n": 60})
        assert seen == list(range(61))


@pytest.mark.expects_error("KeyError: 'oops'", "handler of 'nested' failed", "handler of 'unserialisable' failed")
async def test_errors_of_handlers_reach_the_caller():
    async def full(peer_id, body, data):
        raise RemoteError("no space for 3 blocks", "full")

    async def bug(peer_id, body, data):
        raise KeyError("oops")

    async def nested(peer_id, body, data):
        raise PeerLost("a third node")

    async def unserialisable(peer_id, body, data):
        return {"x": object()}

    async with channels("a", "b") as (a, b):
        b.handle("full", full)
        with pytest.raises(RemoteError, match="no space for 3 blocks") as caught:
            await a.call("b", "full", {})
        assert caught.value.code == "full"
        for kind, handler in (("bug", bug), ("nested", nested), ("unserialisable", unserialisable)):
            b.handle(kind, handler)
            with pytest.raises(RemoteError, match=f"internal error in {kind}"):
                await a.call("b", kind, {}, timeout_s=5)
        with pytest.raises(RemoteError, match="does not handle"):
            await a.call("b", "nothing", {})
        with pytest.raises(TypeError):
            await a.call("b", "full", {"x": object()})
        with pytest.raises(TypeError):
            a.post("b", "full", {"x": object()})


async def test_questions_as_futures():
    """The first is asked before there is a connection; a cancelled one leaves nothing behind."""

    async def never(peer_id, body, data):
        await asyncio.sleep(60)

    async def full(peer_id, body, data):
        raise RemoteError("no space", "full")

    async with channels("a", "b") as (a, b):
        for kind, handler in (("echo", echo), ("never", never), ("full", full)):
            b.handle(kind, handler)
        a.handle("echo", echo)
        first, own = a.ask("b", "echo", {"n": 1}, [b"x"]), a.ask("a", "echo", {"n": 2})
        frame = await first
        assert frame.header["b"] == {"from": "a", "n": 1} and bytes(frame.data) == b"x!"
        assert (await own).header["b"] == {"from": "a", "n": 2}
        with pytest.raises(RemoteError, match="no space"):
            await a.ask("b", "full", {})
        waiting, cancelled = a.ask("b", "never", {}), a.ask("b", "never", {})
        assert not isinstance(waiting, asyncio.Task) and len(a._calls) == 2
        cancelled.cancel()
        await until(lambda: len(a._calls) == 1)
        a.drop("b", "declared dead")
        with pytest.raises(PeerLost):
            await waiting
        await until(lambda: not a._calls)


async def test_every_call_has_a_deadline():
    async def never(peer_id, body, data):
        await asyncio.Event().wait()

    async with channels("a", "b") as (a, b):
        b.handle("never", never)
        for peer in ("a", "b"):
            a.handle("never", never)
            with pytest.raises(TimeoutError, match=r"did not answer 'never' within 0\.05 s"):
                await a.call(peer, "never", {}, timeout_s=0.05)
        assert not a._calls


async def test_loss_fails_calls_and_is_told_once_on_both_sides():
    lost = []

    async def never(peer_id, body, data):
        await asyncio.Event().wait()

    async with channels("a", "b") as (a, b):
        b.handle("never", never)
        b.handle("echo", echo)
        a.on_lost(lambda peer: lost.append(("a", peer)))
        b.on_lost(lambda peer: lost.append(("b", peer)))
        call = asyncio.create_task(a.call("b", "never", {}))
        await a.call("b", "echo", {})
        a.drop("b", "gossip says so")
        with pytest.raises(PeerLost, match="gossip says so"):
            await call
        await until(lambda: len(lost) == 2)
        assert sorted(lost) == [("a", "b"), ("b", "a")]
        assert (await a.call("b", "echo", {}))[0] == {"from": "a"}, "the next call dials again"


async def test_lost_connections_give_their_memory_back_without_a_collection(monkeypatch):
    """Each had 256 KiB for what it reads, and is a part of cycles. A store node makes hardly any full collections: it
    grew by 0.7 MiB with each node of a cluster that ended."""
    monkeypatch.setattr(wire, "staging_of", lambda nbytes: memoryview(bytearray(nbytes)))  # tracemalloc sees no maps
    async with channels("a", "b") as (a, b):
        b.handle("echo", echo)
        a.handle("echo", echo)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(20):
                await a.call("b", "echo", {})
                await b.call("a", "echo", {})
                a.drop("b", "gossip says so")
                await until(lambda: not a.links._everyone and not b.links._everyone)
            left, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert most > 2 * STAGING_BYTES > left, "both ends had buffers, and gave them back"


async def test_that_peers_cut_the_connections_of_a_leaving_node_is_no_news_there(caplog):
    caplog.set_level(logging.INFO)
    lost = []
    async with channels("a", "b") as (a, b):
        b.handle("echo", echo)
        await a.call("b", "echo", {})
        a.on_lost(lost.append)
        a.leave()
        b.drop("a", "it has left")
        await until(lambda: lost == ["b"])
    told = [record.getMessage() for record in caplog.records if " lost " in record.getMessage()]
    assert told == ["b lost a: it has left"]


async def test_a_connection_that_breaks_in_the_same_turn_closes_without_an_error():
    """The transport is closed before anybody is told: a write raises under uvloop, where others only warn."""
    async with channels("a", "b") as (a, b):
        b.handle("echo", echo)
        await a.call("b", "echo", {})
        for connection in list(a.links._everyone):
            connection._transport.abort()
            with pytest.raises(PeerLost):
                connection.send({"late": True})
            connection.close()


async def test_close_cancels_handlers_fails_calls_and_leaves_no_descriptor():
    async with channels("first"):
        pass
    await asyncio.sleep(0.05)
    before = open_fds()
    cancelled = []

    async def never(peer_id, body, data):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(peer_id)
            raise

    async with channels("a", "b", "c") as (a, b, c):
        b.handle("never", never)
        a.handle("never", never)
        calls = [asyncio.create_task(a.call("b", "never", {})), asyncio.create_task(c.call("a", "never", {}))]
        await until(lambda: len(b._tasks) == 1 and len(a._tasks) == 1)
        await a.close()
        for call in calls:
            with pytest.raises(PeerLost):
                await call
        await b.close()
        assert sorted(cancelled) == ["a", "c"]
        with pytest.raises(PeerLost, match="closing"):
            await a.call("b", "never", {})
        a.post("b", "never", {})
    await settled_fds(before)


async def test_a_message_of_a_peer_that_is_lost_before_its_handler_begins_is_dropped():
    """Otherwise the handler takes something for a peer after `on_lost` gave back everything that the peer had."""
    seen, lost = [], []

    async def note(peer_id, body, data):
        seen.append(body["n"])

    async with channels("a", "b") as (a, b):
        a.handle("note", note)
        a.on_lost(lost.append)
        await b.call("a", "note", {"n": 0})
        (connection,) = a.links._everyone
        a.frame(connection, Frame({"t": "post", "k": "note", "b": {"n": 1}}, []))
        a.drop("b", "gossip says so")
        assert lost == ["b"]
        await asyncio.sleep(0.05)
        assert seen == [0]
