"""The shell of sched/scaling/: reads the gossiped records, starts nodes by --scale-command, and lets nodes leave.

Every node with --scale-command runs it; one of them acts. Every node can be asked to leave by a member that scales.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from engine.config.config import Config
from engine.config.scaling import command_parts
from engine.scaling.command import call
from engine.scaling.orders import Orders, action_of, period_s, rules_of
from engine.scaling.role_changes import seen
from net.bodies import Nothing, typed
from net.channel.channel import Channel
from net.errors import RemoteError
from net.gossip.driver import Gossip
from net.http.common.frontend import Refused
from net.loop.tasks import keep
from net.metrics.events import Metrics
from sched.gossip.load_word import DRAINING
from sched.gossip.record import NodeRecord
from sched.membership.member import Member, Status
from sched.role_change import Seen
from sched.scaling.autoscaler import Autoscaler, acting
from sched.scaling.bounds import parse, role_name
from sched.scaling.crew import Drain, Effect
from sched.scaling.need import NodeLoad

log = logging.getLogger("mooncake.scaling")

LEAVE = "leave"
"""The message to a node that should leave; the answer means that it has begun."""

SCALES = "scales"
"""In Member.info of nodes that can call the command."""

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
        self._gossip, self._channel = gossip, channel
        self._parts = command_parts(config.scale_command)
        self._rules = rules_of(config, parse(config.scale_nodes))
        self._core = Autoscaler(self._rules)
        self._orders = Orders(metrics, self._act, self._failed)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep(self._run, "scaling")

    async def close(self) -> None:
        """The next node that acts repeats a start; it does not know of a stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._orders.close()

    def state(self) -> dict[str, object]:
        """For GET /debug/state."""
        return {"acts": acting_node(self._gossip), "roles": self._core.state()}

    async def _run(self) -> None:
        told = False
        while True:
            await asyncio.sleep(period_s(self._rules))
            if len(self._gossip.core.mates()) + 1 < len(self._gossip.members):
                if not told:
                    log.warning("--scale-nodes rests: of a cluster of several cells this node knows one cell's load")
                told = True
                continue
            told = False
            nodes = loads(self._gossip.members, self._gossip.records)
            acts = acting_node(self._gossip) == self._gossip.me.node_id
            effects = self._core.step(asyncio.get_running_loop().time(), nodes, acts)
            self._orders.give(effects, self._core.state(), self._rules.start_s)

    async def _act(self, effect: Effect) -> None:
        if isinstance(effect, Drain):
            await self._channel.call(effect.node, LEAVE, {}, timeout_s=ANSWER_TIMEOUT_S)
        else:
            await call(self._parts, action_of(effect), effect.role, effect.node, self._gossip.me.http)

    def _failed(self, now: float, effect: Effect) -> None:
        if not isinstance(effect, Drain):
            self._core.failed(now, effect)


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
