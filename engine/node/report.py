"""A node's reports about itself: for the user who started it, for a joining node, for debugging."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cache.messages import PoolMembers
from engine import __version__
from engine.config.config import Config
from engine.config.flags import as_dict
from engine.front.cluster import Cluster
from engine.node.parts import Blocks, Serving
from engine.observe.recent import Recent
from net.gossip.driver import Gossip
from net.loop.stalls import StallMonitor
from net.transfer.engine import TransferEngine
from sched.gossip.load_word import ROLE_BITS, STAGES, lack_of
from sched.membership.member import Member

# fmt: off
PATH_FIELDS = (
    "peer", "transport", "why", "gb_per_s", "bytes_read", "bytes_written", "p50_ms", "p99_ms", "retries", "failures",
)
RECORD_FIELDS = ("age_s", "work_s", "running", "dram_fill", "ssd_fill", "nic_in", "nic_out")
# fmt: on


def ready_line(me: Member) -> dict[str, Any]:
    """The line on stdout for the user who started this process."""
    return {
        "event": "ready",
        "node_id": me.node_id,
        "roles": list(me.roles),
        "url": f"http://{me.http}",
        "control": list(me.address),
    }


def cluster(identity: dict[str, Any], gossip: Gossip, transfer: TransferEngine) -> dict[str, Any]:
    """GET /cluster: the facts that a joining node needs, and the members with the transport in use to each."""
    paths = {path["peer"]: path["transport"] for path in transfer.snapshot()}
    members = [
        {
            "node_id": member.node_id,
            "roles": list(member.roles),
            "http": f"http://{member.http}",
            "status": member.status.name.lower(),
            "cost": member.cost,
            "place": "/".join(member.place),
            "transport": paths.get(member.node_id),
        }
        for member in gossip.members
    ]
    me = gossip.me
    here = {"node_id": me.node_id, "control": list(me.address), "http": f"http://{me.http}"}
    return here | identity | {"members": members}


def pool_members(gossip: Gossip, block_bytes: int, replicas: int) -> PoolMembers:
    """For clients of the store (cache/store/remote.py): the addresses and sizes of the shares of this site."""
    rows = [
        (member.node_id, *member.address, member.share) for member in gossip.members if member.site == gossip.me.site
    ]
    return PoolMembers(rows, block_bytes, replicas)


def state(config: Config, serving: Serving, cluster: Cluster, blocks: Blocks, stalls: StallMonitor) -> dict[str, Any]:
    """GET /debug/state."""
    return {
        "node_id": config.node_id,
        "loading": serving.not_ready,
        "config": as_dict(config),
        "engine": None if serving.engine is None else serving.engine.state(),
        "store": None if blocks.share is None else blocks.share.stats(),
        "session_blocks": {} if cluster.store.keeper is None else cluster.store.keeper.sessions(),
        "backends": None if serving.fleet is None else serving.fleet.state(),
        "weights": None
        if serving.weights is None
        else {"served": asdict(serving.weights.served), "held": serving.weights.held},
        "scaling": None if serving.scaler is None else serving.scaler.state(),
        "expert_scaling": None if serving.rank_scaler is None else serving.rank_scaler.state(),
        "lending": None if serving.holder is None else serving.holder.state(),
        "kv_events": None if serving.kv_events is None else serving.kv_events.state(),
        "paths": cluster.transfer.snapshot(),
        "wire_codec": cluster.transfer.coded(),
        "regions": cluster.transfer.regions(),
        "event_loop": stalls.state(),
        "gossip": cluster.gossip.counters,
        "records": {
            node_id: {name: getattr(record, name) for name in RECORD_FIELDS}
            for node_id, record in cluster.gossip.records.items()
        },
    }


def live(serving: Serving, cluster: Cluster, blocks: Blocks, stalls: StallMonitor, now: float) -> dict[str, Any]:
    """This node's part of GET /live: load, blocks, tiers, the path to every peer, and its last accepted requests.
    `now`: unix seconds."""
    engine, acceptor = serving.engine, serving.acceptor
    record = None if engine is None else engine.load.record()
    return {
        "version": __version__,
        "loading": serving.not_ready,
        "weights": None if serving.weights is None else serving.weights.served.version or None,
        "load": None
        if record is None
        else {
            "does": [name for name, bit in ROLE_BITS.items() if record.flags & bit],
            "stages": bool(record.flags & STAGES),
            "lack": lack_of(record.flags),
            "running": record.running,
            "waiting": record.waiting,
            "max_running": record.max_running,
            "queued_tokens": record.queued_tokens,
            "work_s": record.work_s,
        },
        "blocks": None if engine is None else engine.pool.usage(),
        "block_bytes": blocks.own.block_bytes,
        "slot_bytes": blocks.geometry.pool_bytes,
        "block_size": blocks.own.block_size,
        "tiers": None if blocks.share is None else blocks.share.stats(),
        "tenants": {} if blocks.share is None else blocks.share.tenants(),
        "paths": [{key: row[key] for key in PATH_FIELDS} for row in cluster.transfer.snapshot()],
        "longest_stall_ms": 1000 * stalls.longest_s,
        "recent": (Recent(blocks.geometry.block_size) if acceptor is None else acceptor.recent).as_dict(now),
    }
