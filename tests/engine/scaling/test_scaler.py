"""The shell of scaling: one node of several calls the command, and a node leaves when a member that scales asks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.flags import UsageError, parse
from engine.node.weights import NodeWeights
from engine.scaling import command
from engine.scaling.command import CommandFailed, call
from engine.scaling.orders import Orders
from engine.scaling.scaler import LEAVE, SCALES, Scaler, loads, may_leave
from engine.update.served import ServedWeights
from net.errors import RemoteError
from net.http.common.frontend import Refused
from net.metrics.events import Metrics
from sched.classes import CLASSES
from sched.gossip.load_word import DRAINING, READING, ROLE_BITS
from sched.gossip.record import NodeRecord
from sched.membership.member import Member, Status
from sched.scaling.autoscaler import Autoscaler
from sched.scaling.bounds import parse as parse_bounds
from sched.scaling.crew import Effect, Rules, Start, Stop

ROLES = ("prefill", "decode", "store")
FLAGS = ["--scale-nodes", "mixed=1..4", "--scale-out-ms", "200", "--scale-in-ms", "400", "--scale-command"]
WRITES = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + chr(10))"


def member(name: str, **info: object) -> Member:
    return Member(name, ("h", 1), http=f"{name}:80", roles=ROLES, info={SCALES: True, **info})


def record(running: int, **more: int) -> NodeRecord:
    flags = sum(ROLE_BITS.values())
    known = {"version": 1, "running": running, "running_soon": running, "max_running": 4, "blocks_total": 100}
    return NodeRecord(**known | {"flags": flags, "blocks_soon": running} | more)


def writing(path: Path) -> str:
    return f'{sys.executable} -c "{WRITES}" {path} {{action}} {{role}} {{name}} {{join}}'


def scalers(members: list[Member], records: dict[str, NodeRecord], path: Path, strangers: int = 0) -> list[Scaler]:
    """strangers: members of another cell."""
    config = parse([*FLAGS, writing(path)])
    core = SimpleNamespace(mates=lambda: members[1 + strangers :])
    return [
        Scaler(
            config, SimpleNamespace(me=me, members=members, records=records, core=core), None, Metrics("m", me.node_id)
        )
        for me in members
    ]


async def test_of_several_nodes_one_starts_another(tmp_path):
    members = [member(name) for name in "abc"]
    records = {one.node_id: record(running=4) for one in members}
    path = tmp_path / "calls"
    shells = scalers(members, records, path)
    acts = {shell.state()["acts"] for shell in shells}
    assert len(acts) == 1
    for shell in shells:
        shell.start()
    try:
        async with asyncio.timeout(20):
            while not path.exists() or not path.read_text():  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
    finally:
        for shell in shells:
            await shell.close()
    (actor,) = acts
    assert path.read_text() == f"start mixed scaled-mixed-0 {actor}:80\n", "once, though three nodes see the load"
    texts = {shell._gossip.me.node_id: shell._orders._metrics.text().decode() for shell in shells}
    done = 'mooncake:scaling_actions_total{action="start"'
    assert done in texts[actor] and all(done not in text for name, text in texts.items() if name != actor)


async def test_a_node_that_knows_only_a_cell_starts_nobody(tmp_path, caplog):
    members = [member(name) for name in "ab"]
    shells = scalers(members, {one.node_id: record(running=4) for one in members}, tmp_path / "calls", strangers=1)
    for shell in shells:
        shell.start()
    await asyncio.sleep(1.0)
    for shell in shells:
        await shell.close()
    assert not (tmp_path / "calls").exists() and caplog.text.count("--scale-nodes rests") == 2


async def test_a_node_that_leaves_does_not_act(tmp_path):
    members = [member(name) for name in "ab"]
    records = {one.node_id: record(running=0) for one in members}
    shell, _ = scalers(members, records, tmp_path / "calls")
    first = shell.state()["acts"]
    other = ({"a", "b"} - {first}).pop()
    records[first] = record(running=0, flags=record(0).flags | DRAINING)
    assert shell.state()["acts"] == other
    records[first] = NodeRecord(version=1)
    assert shell.state()["acts"] == other, "it still loads its model, and does not look yet"


def test_what_counts_as_ready():
    members = [member("a"), member("b"), member("c", cost=2.5), Member("s", ("h", 1), roles=("store",))]
    records = {"b": NodeRecord(version=1), "c": record(running=3), "s": NodeRecord(version=1, nic_in=0.5)}
    found = {one.node_id: one for one in loads(members, records)}
    assert {name: one.ready for name, one in found.items()} == {"a": False, "b": False, "c": True, "s": True}
    assert (found["c"].cost, found["a"].cost, found["c"].running, found["s"].nic) == (2.5, 1.0, 3, 0.5)
    assert (found["c"].role, found["s"].role) == ("mixed", "store")
    leaving = loads(members[2:3], {"c": record(running=3, flags=record(0).flags | DRAINING)})
    assert leaving[0].draining and not leaving[0].takes
    (reads,) = loads(members[2:3], {"c": record(running=3, flags=record(0).flags | READING)})
    assert reads.takes and not reads.draining, "it stays, and takes requests again in a moment"
    dead = Member("d", ("h", 1), roles=ROLES, status=Status.DEAD)
    assert loads([dead], {"d": record(running=0)}) == []


@pytest.mark.parametrize(("flag", "started"), [(READING, 0), (DRAINING, 1)])
def test_a_node_that_reads_weights_is_not_replaced(flag, started):
    """Requests for three nodes, on three; one of them takes no more requests."""
    members = [member(name) for name in "abc"]
    records = {name: record(running=2) for name in "ab"} | {"c": record(running=2, flags=record(0).flags | flag)}
    core = Autoscaler(Rules(parse_bounds("mixed=3..4"), CLASSES["standard"], 1.0, 60.0, 30.0))
    effects = [effect for second in range(20) for effect in core.step(second, loads(members, records), acts=True)]
    assert len([one for one in effects if isinstance(one, Start)]) == started
    assert core.state()["mixed"]["ready"] == 3 - started


def behind(why: str | None) -> Any:
    """The weights of a node that lacks those of the cluster, or not."""
    return SimpleNamespace(member=SimpleNamespace(behind=why, served=ServedWeights()))


def test_a_record_says_that_the_node_reads_weights():
    has, lacks = (NodeWeights.onto(behind(why), record(0)).flags for why in (None, "reading the weights"))
    assert has == record(0).flags and lacks == has | READING and not lacks & DRAINING


@pytest.mark.parametrize(
    ("peer", "refusal", "words"),
    [
        ("scales", None, None),
        ("plain", None, "only a member"),
        ("unknown", None, "only a member"),
        ("idle", None, "as this node sees it scales acts"),
        ("scales", "no other node has role decode", "no other node"),
    ],
)
async def test_who_may_ask_a_node_to_leave(peer, refusal, words):
    handlers, asked = {}, []
    known = {name: member(name) for name in ("scales", "idle")} | {"plain": Member("plain", ("h", 1), roles=ROLES)}
    records = {"scales": record(running=0), "idle": record(0, flags=record(0).flags | DRAINING)}
    gossip = SimpleNamespace(core=SimpleNamespace(membership=known), members=list(known.values()), records=records)

    def ask(timeout_s: float | None, grace_s: float, force: bool) -> None:
        if refusal is not None:
            raise Refused(refusal)
        asked.append((timeout_s, force))

    may_leave(SimpleNamespace(handle=handlers.__setitem__), gossip, ask)
    if words is None:
        assert await handlers[LEAVE](peer, {}, memoryview(b"")) == {}
        assert asked == [(300.0, False)]
        return
    with pytest.raises(RemoteError, match=words):
        await handlers[LEAVE](peer, {}, memoryview(b""))
    assert asked == []


async def test_a_command_that_fails_says_why():
    script = "import sys; print('starting'); print('no node is free'); sys.exit(3)"
    with pytest.raises(CommandFailed, match="exit code 3: no node is free"):
        await call([sys.executable, "-c", script, "{action}"], "start", "decode", "n", "h:1")
    with pytest.raises(CommandFailed, match="/no/such"):
        await call(["/no/such", "{action}"], "start", "decode", "n", "h:1")


async def test_a_node_that_the_command_leaves_behind_is_not_waited_for(tmp_path):
    path = tmp_path / "pid"
    async with asyncio.timeout(30):
        await call(["sh", "-c", f"sleep 60 & echo $! > {path}"], "start", "decode", "n", "h:1")
    os.kill(int(path.read_text()), signal.SIGKILL)


def runs(pid: str) -> bool:
    """Not if only its exit code is left."""
    place = Path(f"/proc/{pid}/cmdline")
    return place.exists() and bool(place.read_bytes())


async def test_a_command_that_hangs_ends_with_what_it_called(monkeypatch, tmp_path):
    """A shell that waits for an ssh: the shell alone would leave one more ssh behind at every try."""
    monkeypatch.setattr(command, "TIMEOUT_S", 1.0)
    path = tmp_path / "pid"
    with pytest.raises(CommandFailed, match="still running after 1 s"):
        await call(["sh", "-c", f"sleep 600 & echo $! > {path}; wait"], "start", "decode", "n", "h:1")
    async with asyncio.timeout(30):
        while runs(path.read_text().strip()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def test_a_command_that_cannot_write_anywhere_has_failed(monkeypatch, tmp_path):
    """It is tried again, like one that cannot be started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(CommandFailed, match="No such file"):
        await call(["true"], "start", "decode", "n", "h:1")


async def test_no_shell_reads_the_arguments(tmp_path):
    path = tmp_path / "said"
    await call([sys.executable, "-c", WRITES, str(path), "{role};{name}", "{join}"], "start", "$(id)", "a b", "`x`")
    assert path.read_text() == "$(id);a b `x`\n"


async def test_the_role_is_as_a_node_takes_it(tmp_path):
    path = tmp_path / "said"
    await call([sys.executable, "-c", WRITES, str(path), "{role}"], "start", "prefill+decode", "n", "h:1")
    assert parse(["--role", path.read_text().strip()]).role == "prefill,decode"


async def test_orders_for_one_node_run_one_after_the_other():
    """A stop that is slow and the start that follows it: together, the stop would end the new node."""
    told, may_end = [], asyncio.Event()

    async def act(effect: Effect) -> None:
        told.append(("begins", effect))
        if isinstance(effect, Stop):
            await may_end.wait()
        told.append(("ends", effect))

    stop, start, other = Stop("decode", "n"), Start("decode", "n"), Start("decode", "m")
    orders = Orders(Metrics("m", "n"), act, lambda now, effect: None)
    orders.give([stop, other], {"decode": {}}, 1.0)
    orders.give([start], {"decode": {}}, 1.0)
    async with asyncio.timeout(30):
        while ("ends", other) not in told:  # noqa: ASYNC110 - another task
            await asyncio.sleep(0.01)
        assert ("begins", start) not in told
        may_end.set()
        while ("ends", start) not in told:  # noqa: ASYNC110 - another task
            await asyncio.sleep(0.01)
    assert told[-3:] == [("ends", stop), ("begins", start), ("ends", start)]
    assert await orders.close() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scale-nodes", "decode=1..4"], "--scale-command and --scale-nodes go together"),
        (["--scale-command", "run {action} {role} {name}"], "go together"),
        ([*FLAGS, "run {action} {role}"], "does not use {name}"),
        ([*FLAGS, "run {action} {role} {name} {node}"], "{node} is no placeholder"),
        ([*FLAGS, "run '{action} {role} {name}"], "--scale-command"),
        (["--scale-nodes", "decode=4", "--scale-command", "run {action} {role} {name}"], "ROLE=LEAST..MOST"),
        (["--node-cost", "-1"], "--node-cost"),
        (["--node-cost", "nan"], "--node-cost"),
    ],
)
def test_flags_that_cannot_be(flags, words):
    with pytest.raises(UsageError, match=words.replace("{", r"\{")):
        parse(flags)
