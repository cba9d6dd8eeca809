"""Real sockets on 127.0.0.1: the shell carries out what the cores decide. Protocol cases are in tests/sched."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from net.gossip.driver import Gossip, JoinRefused
from net.loop.restarts import Restarts
from net.loop.supervisor import Supervisor
from sched.gossip.state import NodeRecord
from sched.membership.events import Datagram, Tick
from sched.membership.member import Member, Status, presets

LOCAL = presets["local"]


@dataclass
class Node:
    gossip: Gossip
    address: tuple[str, int]
    load: list[NodeRecord]
    ups: list[str] = field(default_factory=list)
    downs: list[tuple[str, str]] = field(default_factory=list)

    def sees(self) -> set[str]:
        return {member.node_id for member in self.gossip.members}


@pytest.fixture
async def start() -> AsyncIterator[Callable]:
    """Starts nodes and closes them all at the end."""
    async with AsyncExitStack() as stack:

        async def start_one(name: str, root: str = "aa" * 16, block_size: int = 16) -> Node:
            load = [NodeRecord(blocks_total=100)]
            info = {"model": "toy", "block_size": block_size, "root": root}
            me = Member(name, ("127.0.0.1", 0), "127.0.0.1:1", ("prefill", "decode"), info=info)
            gossip = await stack.enter_async_context(Gossip(me, LOCAL, random.Random(), lambda: load[0]))
            node = Node(gossip, await gossip.start("127.0.0.1", 0), load)
            gossip.on_up(lambda member: node.ups.append(member.node_id))
            gossip.on_down(lambda member, reason: node.downs.append((member.node_id, reason)))
            return node

        yield start_one


async def reached(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def cluster(start: Callable, size: int) -> list[Node]:
    nodes = [await start(f"n{i}") for i in range(size)]
    for i, node in enumerate(nodes[1:], 1):
        await node.gossip.join(random.choice(nodes[:i]).address)
    everybody = {f"n{i}" for i in range(size)}
    await reached(lambda: all(node.sees() == everybody for node in nodes))
    return nodes


async def test_nodes_join_through_any_node_and_learn_each_other_s_load(start):
    nodes = await cluster(start, 4)
    assert all(sorted(node.ups) == sorted({"n0", "n1", "n2", "n3"} - {f"n{i}"}) for i, node in enumerate(nodes))
    nodes[2].load[0] = NodeRecord(blocks_total=100, blocks_used=40, waiting=3, work_s=500.0)
    await reached(lambda: all(node.gossip.records.get("n2", NodeRecord()).waiting == 3 for node in nodes))
    for node in nodes:
        record = node.gossip.records["n2"]
        assert record.blocks_used == 40 and 400 < record.work_s <= 500
    everyone = {"n0", "n1", "n2", "n3"}
    await reached(lambda: all(set(node.gossip.records) == everyone for node in nodes))


async def test_nodes_learn_what_each_other_s_cache_holds(start):
    nodes = await cluster(start, 3)
    chain = [bytes([i]) * 16 for i in range(4)]
    for key in chain:
        nodes[1].gossip.cached(key, True)
    nodes[1].gossip.cached(chain[3], False)
    for node in nodes:
        holders = node.gossip.core.digests.holders
        await reached(lambda: holders.best_hits(chain).tolist()[holders.index("n1")] == 3)  # noqa: B023
        assert sum(holders.best_hits(chain)) == 3


async def test_a_killed_node_goes_down_everywhere(start):
    nodes = await cluster(start, 4)
    await nodes[1].gossip.close()
    rest = [nodes[0], nodes[2], nodes[3]]
    await reached(lambda: all(node.sees() == {"n0", "n2", "n3"} for node in rest))
    for node in rest:
        [(node_id, reason)] = node.downs
        assert node_id == "n1" and reason.startswith("dead")
        assert "n1" not in node.gossip.records


async def test_a_broken_connection_makes_a_suspect_at_once_and_a_living_node_refutes(start):
    nodes = await cluster(start, 3)
    nodes[0].gossip.suspect("n1")
    nodes[0].gossip.suspect("nobody")
    by_name = {member.node_id: member for member in nodes[0].gossip.members}
    assert by_name["n1"].status is Status.SUSPECT
    await reached(lambda: nodes[1].gossip.me.incarnation > 0)
    await reached(lambda: all(member.status is Status.ALIVE for member in nodes[0].gossip.members))
    assert not nodes[0].downs


async def test_a_node_that_leaves_is_gone_with_that_reason(start):
    nodes = await cluster(start, 4)
    await nodes[3].gossip.leave()
    await nodes[3].gossip.close()
    await reached(lambda: all(node.downs == [("n3", "left")] for node in nodes[:3]))


async def test_a_joiner_with_another_root_learns_why(start):
    nodes = await cluster(start, 2)
    stranger = await start("stranger", root="bb" * 16, block_size=32)
    with pytest.raises(JoinRefused, match=r"block size 32.*block size 16"):
        await stranger.gossip.join(nodes[0].address)
    assert stranger.sees() == {"stranger"} and nodes[0].sees() == {"n0", "n1"}
    assert nodes[0].gossip.counters["refused_joins"] >= 1


async def test_joining_nobody_times_out_with_the_address(start):
    node = await start("n0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError, match=f"127.0.0.1:{port}"):
            await node.gossip.join(("127.0.0.1", port), timeout_s=0.3)
    assert node.sees() == {"n0"}


async def test_garbage_on_the_socket_is_counted(start):
    node = await start("n0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for payload in (b"", b"GET / HTTP/1.1", random.randbytes(1400)):
            stranger.sendto(payload, node.address)
    await reached(lambda: sum(n for name, n in node.gossip.counters.items() if name.startswith("dropped")) == 3)


@pytest.mark.expects_error("membership callback failed")
async def test_a_failing_callback_does_not_stop_the_gossip(start):
    first, second = await start("n0"), await start("n1")

    def broken(member: Member) -> None:
        raise RuntimeError("bug")

    first.gossip.on_up(broken)
    await second.gossip.join(first.address)
    await reached(lambda: first.sees() == {"n0", "n1"})


@pytest.mark.expects_error("background task 'gossip' failed and is started again")
async def test_a_tick_that_fails_does_not_end_the_gossip(start, monkeypatch):
    first, second = await start("n0"), await start("n1")
    first.gossip._restarts = Restarts(first_pause_s=0.001)
    real, failed = first.gossip.core.handle, []

    def broken(now, event):
        if isinstance(event, Tick) and len(failed) < 3:
            failed.append(now)
            raise RuntimeError("bug")
        return real(now, event)

    monkeypatch.setattr(first.gossip.core, "handle", broken)
    await reached(lambda: len(failed) == 3)
    await second.gossip.join(first.address)
    await reached(lambda: first.sees() == second.sees() == {"n0", "n1"})


@pytest.mark.expects_error("background task 'gossip' failed and is started", "is not started again: the node leaves")
async def test_gossip_that_fails_too_often_makes_the_node_leave(start, monkeypatch):
    node, told = await start("n0"), []
    node.gossip._restarts = Restarts(2, first_pause_s=0.001)
    supervisor = Supervisor(lambda name: None, told.append)
    supervisor.install()

    def broken(now, event):
        raise RuntimeError("bug")

    monkeypatch.setattr(node.gossip.core, "handle", broken)
    await reached(lambda: told == ["background task 'gossip' failed: RuntimeError: bug"])
    supervisor.remove()


@pytest.mark.expects_error("background task 'gossip packet' failed")
async def test_a_packet_that_cannot_be_handled_is_dropped(start, monkeypatch, caplog):
    first, second = await start("n0"), await start("n1")
    real = first.gossip.core.handle

    def broken(now, event):
        if isinstance(event, Datagram):
            raise RuntimeError("bug")
        return real(now, event)

    monkeypatch.setattr(first.gossip.core, "handle", broken)
    joining = asyncio.create_task(second.gossip.join(first.address))
    await reached(lambda: first.gossip.counters.get("dropped_failed", 0) > 8)
    assert sum("gossip packet" in record.getMessage() for record in caplog.records) <= 5, "the log is not filled"
    monkeypatch.undo()
    await joining
    await reached(lambda: first.sees() == {"n0", "n1"})


async def test_a_wildcard_address_is_refused_with_the_remedy():
    gossip = Gossip(Member("n0", ("", 0)), LOCAL, random.Random(), NodeRecord)
    with pytest.raises(ValueError, match="--host"):
        await gossip.start("0.0.0.0")


async def test_before_start_there_is_a_clear_error():
    gossip = Gossip(Member("n0", ("127.0.0.1", 0)), LOCAL, random.Random(), NodeRecord)
    with pytest.raises(RuntimeError, match="start"):
        _ = gossip.members
    await gossip.close()


async def test_a_tick_that_is_late_already_can_be_armed_again(start, monkeypatch):
    """uvloop's call_at returns a Handle without `when` for a time that has passed: a busy loop comes late."""
    node = await start("n0")
    monkeypatch.setattr(node.gossip.core, "wake_at", lambda: 0.0)
    for _ in range(3):
        node.gossip._arm(0.0)
    await asyncio.sleep(0.01)
    assert node.gossip.members


async def test_a_packet_that_comes_before_the_gossip_runs_is_dropped(start, caplog):
    """A node that starts again has a port to which others still send."""
    node = await start("a")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        other.setblocking(False)
        joining = asyncio.create_task(node.gossip.join(other.getsockname(), timeout_s=5))
        payload = await asyncio.get_running_loop().sock_recv(other, 65536)
        joining.cancel()
    me = Member("b", ("127.0.0.1", 0), "127.0.0.1:1", ("decode",))
    async with Gossip(me, LOCAL, random.Random(), NodeRecord) as early:
        early._received(payload, node.address)
        assert early._guard.dropped == {"early": 1} and not caplog.records
