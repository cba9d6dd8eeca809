"""The shell of sched/role_change.py: reads the gossiped records every few seconds and sets the engine's role. With
--first-role. Nodes of other sites do not count: a site that lacks a role takes no request."""

from __future__ import annotations

import asyncio
import logging

from engine.core.engine_load import EngineLoad
from engine.sites.members import mates
from net.gossip.driver import Gossip
from net.loop.tasks import keep
from sched.gossip.load_word import ROLE_BITS
from sched.gossip.record import NodeRecord
from sched.membership.member import Member, Status
from sched.role_change import BOTH, Seen
from sched.role_ratio import role_policies

log = logging.getLogger("mooncake.roles")

PERIOD_S = 2.0


class RoleChanges:
    """The role changes of an engine node that can prefill and decode."""

    def __init__(self, gossip: Gossip, load: EngineLoad, hold_s: float, policy: str = "threshold") -> None:
        """hold_s: see RoleController; policy: a name of role_policies."""
        self._gossip, self._load = gossip, load
        self._controller = role_policies[policy](gossip.me.node_id, hold_s)
        self._period_s = min(PERIOD_S, hold_s / 4)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = keep(self._run, "changing the role")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            records = self._gossip.records
            nodes = [
                seen(member, records[member.node_id])
                for member in mates(self._gossip)
                if member.status is Status.ALIVE and member.node_id in records and BOTH & set(member.roles)
            ]
            does = self._controller.step(asyncio.get_running_loop().time(), nodes)
            if does is not None:
                log.info(
                    "this node now accepts: %s",
                    " and ".join(sorted(does)) or "no new requests until the current ones finish",
                )
                self._load.does = does


def seen(member: Member, record: NodeRecord) -> Seen:
    """A node in the form that the rules take."""
    roles = BOTH & set(member.roles)
    does = frozenset(role for role in roles if record.flags & ROLE_BITS[role])
    first = member.info.get("first_role")
    home = BOTH & set(map(str, first)) if isinstance(first, list) else frozenset[str]()
    return Seen(
        node_id=member.node_id,
        can=roles if home else does,
        does=does if record.flags else roles,
        work_s=record.work_s if record.queued_tokens else 0.0,  # not the rest of a step of decodes
        running_soon=record.running_soon,
        max_running=record.max_running,
        blocks_soon=record.blocks_soon,
        blocks_total=record.blocks_total,
        home=home or does,
    )
