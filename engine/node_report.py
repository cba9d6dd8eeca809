"""What a node says of itself: to whoever started it, to a joiner, to whoever debugs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.flags import as_dict
from net.gossip import Gossip
from net.transfer import TransferEngine
from sched.member import Member

if TYPE_CHECKING:
    from engine.node import Node


def ready_line(me: Member) -> dict[str, Any]:
    """Printed on stdout for whoever started this process."""
    return {
        "event": "ready",
        "node_id": me.node_id,
        "roles": list(me.roles),
        "url": f"http://{me.http}",
        "control": list(me.address),
    }


def cluster(identity: dict[str, Any], gossip: Gossip, transfer: TransferEngine) -> dict[str, Any]:
    """GET /cluster: what a joiner must know, and the members with the transport in use to each."""
    paths = {path["peer"]: path["transport"] for path in transfer.snapshot()}
    members = [
        {
            "node_id": member.node_id,
            "roles": list(member.roles),
            "http": f"http://{member.http}",
            "status": member.status.name.lower(),
            "transport": paths.get(member.node_id),
        }
        for member in gossip.members
    ]
    me = gossip.me
    here = {"node_id": me.node_id, "control": list(me.address), "http": f"http://{me.http}"}
    return here | identity | {"members": members}


def state(node: Node) -> dict[str, Any]:
    """GET /debug/state."""
    return {
        "node_id": node.config.node_id,
        "loading": node.loading,
        "config": as_dict(node.config),
        "engine": None if node.engine is None else node.engine.state(),
        "store": None if node.share is None else node.share.stats(),
        "paths": node.transfer.snapshot(),
        "event_loop": node.stalls.state(),
        "gossip": node.gossip.counters,
        "records": {
            node_id: {"age_s": record.age_s, "work_s": record.work_s, "running": record.running}
            for node_id, record in node.gossip.records.items()
        },
    }
