"""The path that KV would take to a peer: derived from this machine, or tested with a running peer."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from engine.doctor.finding import FAIL, OK, WARN, Finding, System
from engine.doctor.rdma import DEVICES
from net.bodies import Nothing, answered, encode
from net.channel.channel import Channel, PeerRefused
from net.channel.cluster_key import ClusterKey
from net.errors import PeerLost, RemoteError, TransferError
from net.http.client import IDENTITY, ClusterError, fetch_cluster
from net.transfer.engine import TransferEngine, transports
from net.transfer.path_finder import OPEN, Offers
from net.transfer.rdma.transport import PLAINTEXT

ANSWER_S = 2.0  # short: the doctor does not wait for a starting node
OTHERS_MAX = 16  # further nodes of the cluster to try, in addition to the named one

BETTER = {
    "shm": "run both nodes on one host, as one user, in containers that share their directory for temporary files",
    "rdma": "an active RDMA device on both nodes (see the checks above, and run doctor on the peer)",
    PLAINTEXT: "--rdma-plaintext on both nodes, if that network is trusted: over TCP the cluster key seals KV",
}


@dataclass(frozen=True, slots=True)
class Tried:
    """One transport to the peer."""

    name: str
    usable: bool
    why: str


def verdict(tried: list[Tried], name: str = "path") -> Finding:
    """The path that `--transport auto` takes, and the remedies for better ones."""
    path = next((one for one in tried if one.usable), None)
    if path is None:
        return Finding(name, FAIL, "no transport reaches the peer", "open its control port for TCP (--control-port)")
    missed = tried[: tried.index(path)]
    if not missed:
        return Finding(name, OK, f"{path.name}: {path.why}; there is no better one")
    remedy = "; or ".join(f"for {one.name}: {_better(one)}" for one in missed)
    return Finding(name, OK if path.name != "tcp" else WARN, f"{path.name}: {path.why}", remedy)


def _better(refused: Tried) -> str:
    return BETTER[PLAINTEXT if PLAINTEXT in refused.why else refused.name]


def expected(system: System, sealed_only: bool = False) -> list[Finding]:
    """Without a peer: the expected paths to a peer on this host and on another host. sealed_only: see
    net.transfer.rdma.transport.Rdma."""
    here = Tried("shm", True, "a peer on this host, copies in shared memory")
    active = [name for name in system.names(DEVICES) if "ACTIVE" in system.read(f"{DEVICES}/{name}/ports/1/state")]
    rdma = Tried("rdma", bool(active), f"a peer on another host, over {', '.join(active)}" if active else "no device")
    if active and sealed_only:
        rdma = Tried("rdma", False, PLAINTEXT)
    tcp = Tried("tcp", True, "a peer on another host")
    return [verdict([here], "path, one host"), verdict([rdma, tcp], "path, two hosts")]


async def to_peer(
    address: str, api_key: str | None, options: dict[str, Any], cluster_key: ClusterKey | None = None
) -> list[Finding]:
    """Connect to the node whose HTTP API is at `address`, and to the others of its cluster, like a node of the cluster
    but without joining, and open each transport. The last findings are the paths to these nodes. Raises ClusterError
    if no node answers at `address`."""
    cluster = await fetch_cluster(address, api_key, ANSWER_S, cluster_key)
    out, path = await _to_node(cluster, options, cluster_key)
    others = [one for one in cluster["members"] if one["status"] == "alive" and one["node_id"] != cluster["node_id"]]
    for member in others[:OTHERS_MAX]:
        where = member["http"].removeprefix("http://")
        try:
            other = await fetch_cluster(where, api_key, ANSWER_S, cluster_key)
            out.append((await _to_node(other, options, cluster_key))[1])
        except ClusterError as error:
            why = str(error).removeprefix(f"--join {where}: ")
            out.append(Finding(f"path to {member['node_id']}", FAIL, why, "open its HTTP port to this host"))
    if len(others) > OTHERS_MAX:
        out.append(Finding("other peers", OK, f"{len(others) - OTHERS_MAX} more were not tried"))
    return [*out, path]


async def _to_node(
    cluster: dict[str, Any], options: dict[str, Any], cluster_key: ClusterKey | None
) -> tuple[list[Finding], Finding]:
    """Each transport to the node that gave this answer of GET /cluster, and the path to it."""
    peer = cluster["node_id"]
    about = f"{peer} at {cluster['control'][0]}:{cluster['control'][1]}, model {cluster['model']}"
    out = [Finding("peer", OK, about)]
    tried = []
    for name in transports:
        found, offer, round_trip_s = await _try(name, cluster, options, cluster_key)
        tried.append(found)
        said = "not offered" if offer is None else offer.get("refused", "offered")
        status = OK if found.usable else WARN
        out.append(Finding(f"{name} to {peer}", status, f"{found.why} (the peer: {said})"))
        if round_trip_s is not None and name == "tcp":
            out.append(Finding("round trip", OK, f"{1000 * round_trip_s:.2f} ms for a control message"))
    return out, verdict(tried, f"path to {peer}")


async def _try(
    name: str, cluster: dict[str, Any], options: dict[str, Any], cluster_key: ClusterKey | None
) -> tuple[Tried, dict[str, Any] | None, float | None]:
    """(result, the peer's offer, the round trip of a message in seconds)"""
    identity = {key: cluster[key] for key in IDENTITY}
    channel = Channel(f"doctor-{secrets.token_hex(4)}", identity, lambda theirs: None, cluster_key)
    given = {name: options[name]} if name in options else {}
    transfer = TransferEngine(channel, (name,), given)
    try:
        await channel.start("127.0.0.1")
        peer = await channel.connect(tuple(cluster["control"]))
        begin = time.perf_counter()
        reply, _ = await channel.call(peer, OPEN, encode(Nothing()))
        took = time.perf_counter() - begin
        offer = answered(Offers, reply).offers.get(name)
        try:
            path = await transfer.open(peer)
        except (TransferError, TimeoutError) as error:
            return Tried(name, False, str(error).partition(f"{name}: ")[2] or str(error)), offer, took
        return Tried(name, True, path.reason), offer, took
    except PeerRefused as error:
        return Tried(name, False, f"the peer refuses: {error}"), None, None
    except (PeerLost, RemoteError, OSError, TimeoutError) as error:
        return Tried(name, False, f"the control port does not answer: {error or type(error).__name__}"), None, None
    finally:
        await transfer.close()
        await channel.close()
