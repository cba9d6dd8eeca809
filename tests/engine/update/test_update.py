"""Two phases over nodes in one process, with holders that read nothing: all switch, or none; who misses it follows."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.update import member as member_module
from engine.update.coordinator import WeightUpdates
from engine.update.member import WeightsMember
from engine.update.served import ServedWeights
from net.errors import PeerLost, RemoteError
from net.http.common.frontend import Refused, Unavailable
from sched.gossip.record import RECORD
from sched.membership.member import Member

NEW, OTHER = b"n" * 16, b"o" * 16


class Network:
    """Calls and posts between nodes; nothing reaches a node in `away`."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[str, Any]] = {}
        self.away: set[str] = set()
        self.tasks: set[asyncio.Task[Any]] = set()

    def channel(self, name: str) -> Any:
        handlers = self.handlers[name] = {}

        async def call(peer: str, kind: str, body: Any, data: Any = (), timeout_s: float = 10.0) -> Any:
            await asyncio.sleep(0)
            if {peer, name} & self.away:
                raise PeerLost(f"lost {peer!r}")
            answer = asyncio.create_task(self.handlers[peer][kind](name, body, memoryview(b"")))
            self.tasks.add(answer)
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(answer) or {}, memoryview(b"")

        def post(peer: str, kind: str, body: Any) -> None:
            if not {peer, name} & self.away:
                self.tasks.add(asyncio.create_task(self.handlers[peer][kind](name, body, memoryview(b""))))

        return SimpleNamespace(node_id=name, handle=handlers.__setitem__, call=call, post=post)


class Holder:
    """The tensors under a prefix have the content `tensors[prefix]`, or the error with which they are read."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors, self.current, self.held = tensors, b"", [""]
        self.prepared: dict[str, bytes] = {}
        self.abandoned: list[str] = []
        self.released: list[set[bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def prepare(self, name: str, prefix: str, tenant: str, lease_s: float) -> Any:
        if self.prepared:
            raise RemoteError("another replacement of the weights is under way here", "busy")
        self.prepared[name] = b""
        await self.gate.wait()
        if name not in self.prepared:
            raise RemoteError("the replacement was given up", "abandoned")
        if isinstance(found := self.tensors[prefix], Exception):
            del self.prepared[name]
            raise found
        self.prepared[name] = found
        return SimpleNamespace(key=found, nbytes=10, read_s=0.5, seconds=1.0)

    def abandon(self, name: str) -> None:
        self.abandoned.append(name)
        self.prepared.pop(name, None)

    def switch(self, weights: bytes) -> bool:
        if weights not in (self.current, *self.prepared.values()):
            return False
        self.current = weights
        self.prepared.clear()
        return True

    def release(self, in_use: Any, older_than_s: float = 0.0) -> None:
        if not older_than_s:
            self.released.append(set(in_use))

    async def close(self) -> None:
        self.prepared.clear()


class Cluster:
    """Two nodes that compute, and a store node that only accepts requests."""

    def __init__(self) -> None:
        self.network, self.tensors = Network(), {"new/": NEW, "other/": OTHER}
        self.nodes: dict[str, Any] = {}
        self.members = [Member("p", ("h", 1), roles=("prefill",)), Member("d", ("h", 2), roles=("decode",))]
        self.members.append(Member("s", ("h", 3), roles=("store",)))
        for one in self.members:
            self.add(one.node_id, computes="store" not in one.roles)

    def add(self, name: str, computes: bool) -> Any:
        channel, open_ = self.network.channel(name), Counter[bytes]()
        shown: list[ServedWeights] = []
        gossip = SimpleNamespace(table=([], np.zeros(0, RECORD)))
        member = WeightsMember(channel, gossip, random.Random(0), shown.append, lambda: open_, 60.0)
        holder = Holder(dict(self.tensors)) if computes else None
        updates = WeightUpdates(channel, member, lambda: self.members)
        self.nodes[name] = SimpleNamespace(
            member=member, holder=holder, updates=updates, open=open_, shown=shown, gossip=gossip
        )
        return self.nodes[name]

    async def start(self) -> None:
        for node in self.nodes.values():
            if node.holder is not None:
                await node.member.hold(node.holder)

    def versions(self) -> set[tuple[int, str]]:
        return {(node.member.served.generation, node.member.served.version) for node in self.nodes.values()}

    def tell_tags(self, name: str) -> None:
        """Gossip: the records of all nodes have arrived at this one."""
        rows = np.zeros(len(self.nodes), RECORD)
        rows["version"] = 1
        rows["weights"] = [node.member.served.tag for node in self.nodes.values()]
        self.nodes[name].gossip.table = (list(self.nodes), rows)

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.updates.close()
            await node.member.close()


@pytest.fixture
async def cluster(monkeypatch):
    monkeypatch.setattr(member_module, "WATCH_S", 0.01)
    monkeypatch.setattr(member_module, "FOLLOW_PAUSE_S", 0.01)
    monkeypatch.setattr("engine.update.coordinator.RELEASE_POLL_S", 0.01)
    made = Cluster()
    await made.start()
    yield made
    await made.close()


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - conditions in many places
            await asyncio.sleep(0.001)


async def update(cluster: Cluster, prefix: str, at: str = "s", timeout_s: float = 5.0) -> Any:
    return await cluster.nodes[at].updates.update(prefix, prefix, "default", timeout_s)


async def test_all_nodes_switch_and_old_weights_stay_while_a_client_needs_them(cluster):
    nodes = cluster.nodes
    nodes["s"].open[b""] = 1
    told = await update(cluster, "new/")
    assert (told["generation"], told["key"], told["late"], set(told["nodes"])) == (1, NEW.hex(), {}, {"p", "d"})
    assert cluster.versions() == {(1, "new/")}
    assert [node.shown[-1].content for node in nodes.values()] == [NEW] * 3
    assert nodes["p"].holder.current == nodes["d"].holder.current == NEW
    await until(lambda: nodes["d"].holder.released)
    assert nodes["d"].holder.released[-1] == {b""}, "a client's request runs on the old weights"
    nodes["s"].open.clear()
    nodes["p"].open[NEW] = 1
    await until(lambda: nodes["d"].holder.released[-1] == {NEW})
    assert (await update(cluster, "other/", at="p"))["generation"] == 2
    assert cluster.versions() == {(2, "other/")}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RemoteError("1 of 3 is missing", "tensors"), ValueError, "^1 of 3 is missing$"),
        (RemoteError("not enough memory", "failed"), Unavailable, "^d: not enough memory. No node has switched$"),
        (RemoteError("on CPUs only", "unsupported"), Refused, "^d: on CPUs only. No node has switched$"),
    ],
)
async def test_if_one_node_cannot_prepare_none_switches(cluster, error, kind, text):
    nodes = cluster.nodes
    nodes["d"].holder.tensors["new/"] = error
    nodes["p"].holder.gate.clear()  # it still reads: it need not finish
    with pytest.raises(kind, match=text):
        await update(cluster, "new/")
    assert cluster.versions() == {(0, "")} and not any(node.shown for node in nodes.values())
    await until(lambda: nodes["p"].holder.abandoned)
    assert not nodes["p"].holder.prepared and nodes["p"].holder.current == b""
    nodes["p"].holder.gate.set()
    assert (await update(cluster, "other/"))["generation"] == 1


async def test_tensors_that_change_while_they_are_read_change_nothing(cluster):
    cluster.nodes["d"].holder.tensors["new/"] = OTHER
    with pytest.raises(Refused, match="contents differ"):
        await update(cluster, "new/")
    await until(lambda: cluster.nodes["d"].holder.abandoned and cluster.nodes["p"].holder.abandoned)
    assert cluster.versions() == {(0, "")}


async def test_two_replacements_at_a_time_are_refused(cluster):
    cluster.nodes["p"].holder.gate.clear()
    first = asyncio.create_task(update(cluster, "new/"))
    await until(lambda: cluster.nodes["d"].holder.prepared)
    with pytest.raises(Refused, match="already replaces"):
        await update(cluster, "other/")
    with pytest.raises(Refused, match="another replacement"):
        await update(cluster, "other/", at="p")
    cluster.nodes["p"].holder.gate.set()
    assert (await first)["generation"] == 1 and cluster.versions() == {(1, "new/")}


async def test_a_node_that_does_not_prepare_in_time_is_named(cluster):
    cluster.nodes["p"].holder.gate.clear()
    with pytest.raises(Unavailable, match=r"^p: "):
        await update(cluster, "new/", timeout_s=0.02)
    await until(lambda: not cluster.nodes["d"].holder.prepared)
    assert cluster.versions() == {(0, "")}


async def test_a_client_that_goes_away_stops_nothing(cluster):
    cluster.nodes["p"].holder.gate.clear()
    asked = asyncio.create_task(update(cluster, "new/"))
    await until(lambda: cluster.nodes["d"].holder.prepared)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert cluster.nodes["s"].updates.running
    cluster.nodes["p"].holder.gate.set()
    await until(lambda: cluster.versions() == {(1, "new/")})


async def test_a_node_that_missed_the_switch_follows_the_tags_of_the_others(cluster):
    """The node that computes had prepared; the other one never heard of it."""
    nodes = cluster.nodes

    async def lost(*message: Any) -> Any:
        raise RemoteError("as if it had not arrived", "gone")

    cluster.network.handlers["d"]["weights.switch"] = cluster.network.handlers["s"]["weights.switch"] = lost
    assert set((await update(cluster, "new/", at="p"))["late"]) == {"d", "s"}
    assert nodes["d"].member.served == nodes["s"].member.served == ServedWeights()
    for name in ("d", "s"):
        cluster.tell_tags(name)
        nodes[name].member.start()
    await until(lambda: cluster.versions() == {(1, "new/")})
    assert nodes["d"].holder.current == NEW and nodes["d"].member.behind is None


async def test_a_node_without_the_tensors_is_behind_until_they_are_there(cluster):
    """Then it reads them by itself; other contents under the same prefix are not taken for them."""
    await update(cluster, "new/")
    late = cluster.add("late", computes=True)
    late.holder.tensors["new/"] = RemoteError("3 of 3 are missing", "tensors")
    late.member.take(cluster.nodes["p"].member.served)
    await late.member.hold(late.holder)
    assert "3 of 3 are missing" in (late.member.behind or "") and late.holder.current == b""
    late.holder.tensors["new/"] = OTHER
    await until(lambda: "are others by now" in (late.member.behind or ""))
    assert not late.holder.prepared
    late.holder.tensors["new/"] = NEW
    await until(lambda: late.member.behind is None)
    assert late.holder.current == NEW and late.holder.released == [set()]
