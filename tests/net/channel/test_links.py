"""Who a channel is connected to: refusals, hellos, two that dial at once, restarts, strangers, orderly ends."""

import asyncio

import pytest

from net.channel.channel import Channel, PeerLost, PeerRefused
from net.channel.wire import PREFIX
from tests.net.peers import channels, echo, until


@pytest.mark.parametrize("picky", ["a", "b"])
async def test_refusal_reaches_the_other_side_from_either_end(picky):
    def check(hello):
        return None if hello["root"] == "mine" else "another model: start with the same --model"

    def agree(hello):
        return None

    lost = []
    a = Channel("a", {"root": "theirs" if picky == "b" else "mine"}, check if picky == "a" else agree)
    b = Channel("b", {"root": "theirs" if picky == "a" else "mine"}, check if picky == "b" else agree)
    a.on_lost(lost.append)
    b.on_lost(lost.append)
    await a.start("127.0.0.1")
    address = await b.start("127.0.0.1")
    with pytest.raises(PeerRefused, match="another model: start with the same --model"):
        await a.connect(address)
    a.introduce("b", address)
    with pytest.raises(PeerRefused, match="another model"):
        await a.call("b", "x", {})
    await until(lambda: not b.links._everyone)
    assert not lost
    await a.close()
    await b.close()


async def test_connect_tells_who_is_there_and_both_sides_know_the_hello():
    a, b = Channel("a", {"n": 1}), Channel("b", {"n": 2})
    await a.start("127.0.0.1")
    address = await b.start("0.0.0.0")
    assert await a.connect(("127.0.0.1", address[1])) == "b"
    assert a.hello_of("b") == {"n": 2}
    await until(lambda: b.links.control_now("a") is not None)
    assert b.hello_of("a") == {"n": 1}
    with pytest.raises(KeyError):
        a.hello_of("c")
    assert await a.connect(("127.0.0.1", address[1])) == "b"
    assert len(b.links._everyone) == 1
    await a.close()
    await until(lambda: not b.links._everyone)
    b.handle("echo", echo)
    a2 = Channel("a2", {})
    a2.introduce("b", ("127.0.0.1", address[1]))
    assert (await a2.call("b", "echo", {}))[0] == {"from": "a2"}
    await a2.close()
    await b.close()


async def test_a_second_node_with_the_same_id_is_refused():
    one, two = Channel("a", {}), Channel("a", {})
    address = await one.start("127.0.0.1")
    with pytest.raises(PeerRefused, match="--node-id"):
        await two.connect(address)
    await two.close()
    await one.close()


async def test_simultaneous_open_loses_nothing():
    async with channels("a", "b") as (a, b):
        for node in (a, b):
            node.handle("echo", echo)
        for _ in range(5):
            calls = [left.call(right.node_id, "echo", {"n": n}) for n in range(20) for left, right in ((a, b), (b, a))]
            answers = await asyncio.gather(*calls)
            assert [body["n"] for body, _ in answers] == [n for n in range(20) for _ in "ab"]
            a.drop("b", "the test wants to dial again")
            await until(lambda: a.links.control_now("b") is None and b.links.control_now("a") is None)


async def test_orderly_close_is_not_a_loss():
    lost, closed = [], []
    async with channels("a", "b") as (a, b):
        b.handle("echo", echo)
        for node in (a, b):
            node.on_lost(lost.append)
            node.on_closed(closed.append)
        await a.call("b", "echo", {})
        await b.close()
        await until(lambda: closed == ["b"])
        with pytest.raises(PeerLost, match="cannot reach"):
            await a.call("b", "echo", {})
        assert not lost


async def test_posts_that_cannot_be_delivered_are_a_loss():
    lost = []
    async with channels("a") as (a,):
        a.on_lost(lost.append)
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        server.close()
        await server.wait_closed()
        a.introduce("b", address)
        a.post("b", "x", {})
        a.post("c", "x", {})
        await until(lambda: sorted(lost) == ["b", "c"])


async def test_a_restarted_peer_is_found_again():
    lost = []
    async with channels("a") as (a,):
        a.on_lost(lost.append)
        address = None
        for node_id in ("b", "b", "b2"):
            peer = Channel(node_id, {})
            peer.handle("echo", echo)
            address = await peer.start("127.0.0.1", address[1] if address else 0)
            a.introduce(node_id, address)
            assert (await a.call(node_id, "echo", {}))[0] == {"from": "a"}
            await peer.close()
            await until(lambda: not a.links._everyone)
        with pytest.raises(PeerLost):
            await a.call("b", "echo", {})
        moved = Channel("b2", {})
        moved.handle("echo", echo)
        a.introduce("b", await moved.start("127.0.0.1"))
        with pytest.raises(PeerLost, match="now belongs to 'b2'"):
            await a.call("b", "echo", {})
        assert (await a.call("b2", "echo", {}))[0] == {"from": "a"}
        await moved.close()
        assert not lost


async def test_a_new_process_under_the_same_id_replaces_the_old_one():
    """The old connection is still open here, as after a power cut: the new hello ends it."""
    lost = []
    async with channels("a") as (a,):
        a.on_lost(lost.append)
        old, new = Channel("b", {"life": 1}), Channel("b", {"life": 2})
        for peer in (old, new):
            peer.handle("who", lambda peer_id, body, data, peer=peer: asyncio.sleep(0, {"hello": id(peer)}))
            await peer.start("127.0.0.1")
            peer.introduce("a", a.links.address)
        a.handle("echo", echo)
        await old.call("a", "echo", {})
        assert (await a.call("b", "who", {}))[0] == {"hello": id(old)}
        await new.call("a", "echo", {})
        assert lost == ["b"]
        assert (await a.call("b", "who", {}))[0] == {"hello": id(new)}
        assert a.hello_of("b") == {"life": 2}
        await old.close()
        await new.close()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", PREFIX.pack(b"MOON", 1, 1 << 30, 0)])
async def test_strangers_on_the_port_do_no_harm(noise, monkeypatch):
    monkeypatch.setattr("net.channel.connection.HELLO_S", 0.1)
    async with channels("a", "b") as (a, b):
        reader, writer = await asyncio.open_connection(*b.links.address)
        writer.write(noise)
        assert await reader.read() == b"", "it is cut off"
        writer.close()
        b.handle("echo", echo)
        assert (await a.call("b", "echo", {}))[0] == {"from": "a"}
