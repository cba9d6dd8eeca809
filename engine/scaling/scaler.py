"""The shell of sched/scaling/: reads the gossiped records, starts nodes by --scale-command, and lets nodes leave.

Every node with --scale-command runs it; one of them acts. Every node can be asked to leave by a member that scales.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import fields

from engine.config.config import Config
from engine.config.scaling import command_parts
from engine.scaling.command import CommandFailed, call
from engine.scaling.role_changes import seen
from net.bodies import Nothing, typed
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.gossip.driver import Gossip
from net.http.common.frontend import Refused
from net.loop.tasks import keep, spawn
from net.metrics.events import Metrics
from sched.gossip.load_word import DRAINING
from sched.gossip.record import NodeRecord
from sched.membership.member import Member, Status
from sched.role_change import Seen
from sched.scaling.autoscaler import Autoscaler, Drain, Effect, Rules, acting
from sched.scaling.bounds import parse, role_name
from sched.scaling.need import NodeLoad

log = logging.getLogger("mooncake.scaling")

LEAVE = "leave"
"""The message to a node that should leave; the answer means that it has begun."""

SCALES = "scales"
"""In Member.info of nodes that can call the command."""

PERIOD_S = 1.0
ANSWER_TIMEOUT_S = 5.0
LEAVE_S, GRACE_S = 300.0, 1.0
"""Time for its running requests, and time in which it passes new requests on, as with `mooncake.py drain`."""

Ask = Callable[[float | None, float, bool], None]
"""Lets this node leave: (deadline in seconds, seconds of grace, by force). Raises Refused if it must not."""


def may_leave(channel: Channel, gossip: Gossip, ask: Ask) -> None:
    """Answer members that scale when they ask this node to leave."""

    async def leave(peer: str, body: Nothing, data: memoryview) -> Nothing:
        member = gossip.core.membership.get(peer)
        if member is None or not member.here or not member.info.get(SCALES):
            raise RemoteError("only a member with --scale-command may ask a node to leave", "refused")
        if (acts := acting_node(gossip)) != peer:
            raise RemoteError(f"{peer} asks, but as this node sees it {acts or 'nobody'} acts", "refused")
        try:
            ask(LEAVE_S, GRACE_S, False)
        except Refused as error:
            raise RemoteError(str(error), "refused") from None
        log.info("%s asked this node to leave: the load needs fewer nodes", peer)
        return Nothing()

    channel.handle(LEAVE, typed(Nothing, leave))


def acting_node(gossip: Gossip) -> str | None:
    """The node that acts: one that is ready, does not leave, and can call the command."""
    able = [one for one in gossip.members if one.status is Status.ALIVE and one.info.get(SCALES)]
    return acting(node.node_id for node in loads(able, gossip.records) if node.takes)


class Scaler:
    """Starts and ends nodes for the load of a cluster of one cell; `config` has --scale-command."""

    def __init__(self, config: Config, gossip: Gossip, channel: Channel, metrics: Metrics) -> None:
        assert config.scale_command is not None and config.scale_nodes is not None
        self._gossip, self._channel, self._metrics = gossip, channel, metrics
        self._parts = command_parts(config.scale_command)
        out_s, in_s, start_s = (ms / 1000 for ms in (config.scale_out_ms, config.scale_in_ms, config.scale_start_ms))
        self._core = Autoscaler(Rules(parse(config.scale_nodes), config.classes["standard"], out_s, in_s, start_s))
        self._period_s = min(PERIOD_S, out_s / 4)
        self._task: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = keep(self._run, "scaling")

    async def close(self) -> None:
        """A command that runs is ended. The next node that acts repeats a start; it does not know of a stop."""
        tasks = [*self._running, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def state(self) -> dict[str, object]:
        """For GET /debug/state."""
        return {"acts": acting_node(self._gossip), "roles": self._core.state()}

    async def _run(self) -> None:
        told = False
        while True:
            await asyncio.sleep(self._period_s)
            if len(self._gossip.core.mates()) + 1 < len(self._gossip.members):
                if not told:
                    log.warning("--scale-nodes rests: of a cluster of several cells this node knows one cell's load")
                told = True
                continue
            told = False
            nodes = loads(self._gossip.members, self._gossip.records)
            acts = acting_node(self._gossip) == self._gossip.me.node_id
            effects = self._core.step(asyncio.get_running_loop().time(), nodes, acts)
            for role, counts in self._core.state().items():
                for what, count in counts.items():
                    self._metrics.set("mooncake:scaling_nodes", count, role=role, state=what)
            for effect in effects:
                task = spawn(self._carry_out(effect), "scaling")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _carry_out(self, effect: Effect) -> None:
        action = type(effect).__name__.lower()
        counts = self._core.state()[effect.role]
        log.info("%s %s: %s", action, effect.node, ", ".join(f"{count} {what}" for what, count in counts.items()))
        work: Awaitable[object]
        if isinstance(effect, Drain):
            work = self._channel.call(effect.node, LEAVE, {}, timeout_s=ANSWER_TIMEOUT_S)
        else:
            work = call(self._parts, action, effect.role, effect.node, self._gossip.me.http)
        try:
            await work
        except (CommandFailed, PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            log.warning("could not %s %s: %s", action, effect.node, error)
            self._metrics.count("mooncake:scaling_actions", action=action, result="failed")
            if not isinstance(effect, Drain):
                self._core.failed(asyncio.get_running_loop().time(), effect)
            return
        self._metrics.count("mooncake:scaling_actions", action=action, result="done")


def loads(members: Iterable[Member], records: Mapping[str, NodeRecord]) -> list[NodeLoad]:
    """The members in the form that the rules take. A node is ready when its first load has arrived."""
    return [_load(member, records.get(member.node_id)) for member in members if member.here]


def _load(member: Member, record: NodeRecord | None) -> NodeLoad:
    computes = bool({"prefill", "decode"} & set(member.roles))
    known = NodeRecord() if record is None else record
    ready = record is not None and record.version > 0 and (record.blocks_total > 0 or not computes)
    base = seen(member, known)
    return NodeLoad(
        **{field.name: getattr(base, field.name) for field in fields(Seen)},
        role=role_name(member.roles),
        ready=ready,
        draining=bool(known.flags & DRAINING),
        running=known.running,
        waiting=known.waiting,
        step_s=known.decode_step_s,
        nic=max(known.nic_in, known.nic_out),
        cost=member.cost,
    )
