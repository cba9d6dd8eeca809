"""Entering the cluster: asking until the member list has come in all its pages; who may enter, and why not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sched.membership.member import Address, Member, Preset
from sched.membership.outbox import Outbox
from sched.membership.packet import Message


@dataclass(slots=True)
class _Asking:
    """Pages of repeated welcomes add up, so packet loss costs retries, not the join."""

    address: Address
    retry_at: float
    pages: int = 0
    received: set[int] = field(default_factory=set)


class Entrance:
    """This node's own join, while one is under way."""

    def __init__(self, preset: Preset, out: Outbox) -> None:
        self._preset, self._out = preset, out
        self._asking: _Asking | None = None

    def ask(self, now: float, address: Address) -> None:
        """Begin with the next tick, or begin again at another node."""
        self._asking = _Asking(address, now)

    def stop(self) -> None:
        """Do not ask again."""
        self._asking = None

    def wake_at(self) -> float:
        """When a tick is due."""
        return math.inf if self._asking is None else self._asking.retry_at

    def tick(self, now: float, me: Member) -> None:
        """Ask, or ask again."""
        asking = self._asking
        if asking is not None and now >= asking.retry_at:
            asking.retry_at = now + self._preset.probe_timeout_s
            self._out.send(asking.address, "join", updates=(me,))

    def welcomed(self, message: Message) -> bool:
        """A page of the list has come; True when it was the last that was missing, and the join is done."""
        asking = self._asking
        if asking is None:
            return False
        if message.pages != asking.pages:  # the list grew; its entries are merged, only the count starts again
            asking.pages, asking.received = message.pages, set()
        asking.received.add(message.page)
        if len(asking.received) < asking.pages:
            return False
        self._asking = None
        return True

    def refused(self, message: Message, me: Member) -> bool:
        """True when it is the own join that is refused; it is not tried again."""
        if self._asking is None or message.target != me.node_id:
            return False
        self._asking = None
        return True


def obstacle(me: Member, known: Member | None, joiner: Member) -> str | None:
    """Why `joiner` may not enter, None if it may. `known` is what is known of its name."""
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
    """Why its name is not to be had."""
    host, port = holder.address
    return f"node id {holder.node_id} is taken by the node at {host}:{port}, which lives: choose another --node-id"


class Successions:
    """Nodes that ask to join under the name of a member elsewhere: its next self, most often, started before the death
    of the last one is known. They wait while the member is suspected; one that lives refutes it and keeps the name."""

    def __init__(self) -> None:
        self._doubted: dict[str, tuple[int, int]] = {}  # name -> (life of who wants it, incarnation of who has it)

    def waits(self, holder: Member, joiner: Member) -> bool:
        """True when `joiner` must ask again later: suspect the holder now. False when that has refuted a suspicion
        since it was asked first."""
        life, incarnation = self._doubted.get(joiner.node_id, (joiner.life, holder.incarnation))
        if life != joiner.life:
            incarnation = holder.incarnation
        self._doubted[joiner.node_id] = joiner.life, incarnation
        return holder.incarnation <= incarnation

    def over(self, node_id: str) -> None:
        """The name is given, or kept."""
        self._doubted.pop(node_id, None)


def contested(holder: Member | None, joiner: Member) -> bool:
    """Somebody elsewhere has the name."""
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
    """The flags to change; what else goes into the root when those that show here are equal."""
    flags = {"model": "--model", "dtype": "--dtype and --kv-cache-dtype", "block_size": "--block-size"}
    differing = [flag for name, flag in flags.items() if me.info.get(name) != joiner.info.get(name)]
    if differing:
        return f"the same {' and '.join(differing)}"
    return "the same model files and the same version: block layout or weights differ"
