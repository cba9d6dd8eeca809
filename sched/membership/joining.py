"""Joining the cluster: ask until all pages of the member list have arrived; decide which nodes may join."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sched.membership.member import Address, Member, Preset
from sched.membership.outbox import Outbox
from sched.membership.packet import Message


@dataclass(slots=True)
class _Asking:
    """State of a join. Pages of repeated welcomes are combined, so packet loss costs retries, not the join."""

    address: Address
    retry_at: float
    pages: int = 0
    received: set[int] = field(default_factory=set)


class Entrance:
    """This node's own join."""

    def __init__(self, preset: Preset, out: Outbox) -> None:
        self._preset, self._out = preset, out
        self._asking: _Asking | None = None

    def ask(self, now: float, address: Address) -> None:
        """Start the join at the next tick, or restart it at another node."""
        self._asking = _Asking(address, now)

    def stop(self) -> None:
        """Do not ask again."""
        self._asking = None

    def wake_at(self) -> float:
        """Time of the next tick."""
        return math.inf if self._asking is None else self._asking.retry_at

    def tick(self, now: float, me: Member) -> None:
        """Send the join request, or repeat it."""
        asking = self._asking
        if asking is not None and now >= asking.retry_at:
            asking.retry_at = now + self._preset.probe_timeout_s
            self._out.send(asking.address, "join", updates=(me,))

    def welcomed(self, message: Message) -> bool:
        """A page of the list has arrived. Returns True if it was the last missing one, which completes the join."""
        asking = self._asking
        if asking is None:
            return False
        if message.pages != asking.pages:  # the list has grown: count its pages again
            asking.pages, asking.received = message.pages, set()
        asking.received.add(message.page)
        if len(asking.received) < asking.pages:
            return False
        self._asking = None
        return True

    def refused(self, message: Message, me: Member) -> bool:
        """Whether the message refuses this node's own join, which then ends."""
        if self._asking is None or message.target != me.node_id:
            return False
        self._asking = None
        return True


def obstacle(me: Member, known: Member | None, joiner: Member) -> str | None:
    """The reason why `joiner` may not join; None if it may. `known`: the known member of the same name."""
    if joiner.address == me.address:
        return "the address to join is the joining node's own: name another node of the cluster"
    if joiner.info.get("root") != me.info.get("root"):
        reason = (
            f"node {joiner.node_id} computes other KV than this cluster: it has {_cache_of(joiner)}; "
            f"{me.node_id} has {_cache_of(me)}. Start it with {_remedy(me, joiner)}"
        )
        return reason.encode()[:REASON_BYTES].decode(errors="ignore")
    if known is me:
        return taken(me)
    return None


def taken(holder: Member) -> str:
    """The refusal when `holder` is alive under the joiner's name."""
    host, port = holder.address
    return f"node id {holder.node_id} is taken by the node at {host}:{port}, which lives: choose another --node-id"


class Successions:
    """Nodes that ask to join under the name of a member at another address, usually a restart before the cluster knows
    of the member's death. They wait while the member is suspected; a live member refutes and keeps the name."""

    def __init__(self) -> None:
        self._doubted: dict[str, tuple[int, int]] = {}  # name -> (life of the joiner, incarnation of the holder)

    def waits(self, holder: Member, joiner: Member) -> bool:
        """Returns True if `joiner` must ask again later; the caller suspects the holder now. Returns False if the
        holder has refuted a suspicion since the first request."""
        life, incarnation = self._doubted.get(joiner.node_id, (joiner.life, holder.incarnation))
        if life != joiner.life:
            incarnation = holder.incarnation
        self._doubted[joiner.node_id] = joiner.life, incarnation
        return holder.incarnation <= incarnation

    def over(self, node_id: str) -> None:
        """The name has been decided: drop its state."""
        self._doubted.pop(node_id, None)


def contested(holder: Member | None, joiner: Member) -> bool:
    """Whether a live node at another address has the joiner's name."""
    return holder is not None and holder.here and holder.address != joiner.address


REASON_BYTES = 600
"""Fits a packet even if every byte of a model's name needs an escape."""


def _cache_of(member: Member) -> str:
    info = member.info
    return (
        f"model {info.get('model', 'unknown')!s:.100}, dtype {info.get('dtype', 'unknown')!s:.12}, "
        f"block size {info.get('block_size', 'unknown')!s:.12}, root {info.get('root', 'none')!s:.12}"
    )


def _remedy(me: Member, joiner: Member) -> str:
    """The flags that the joiner must change; if the visible ones agree, the other inputs of the root."""
    flags = {"model": "--model", "dtype": "--cluster-kv-dtype", "block_size": "--cluster-block-size"}
    differing = [flag for name, flag in flags.items() if me.info.get(name) != joiner.info.get(name)]
    if differing:
        return f"the same {' and '.join(differing)}"
    return "the same model files and the same version: block layout or weights differ"
