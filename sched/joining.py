"""Entering the cluster: who may, why not, and the member list that arrives in pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from sched.member import Address, Member


@dataclass(slots=True)
class Joining:
    """A join under way. Pages of repeated welcomes add up, so packet loss costs retries, not the join."""

    address: Address
    retry_at: float
    _pages: int = 0
    _received: set[int] = field(default_factory=set)

    def got(self, page: int, pages: int) -> bool:
        """Note one page; True when the list is complete."""
        if pages != self._pages:  # the list grew meanwhile; its entries are merged, only the count starts again
            self._pages, self._received = pages, set()
        self._received.add(page)
        return len(self._received) >= pages


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
    if known is not None and known.here and known.address != joiner.address:
        host, port = known.address
        return (
            f"node id {joiner.node_id} is taken by the node at {host}:{port}: choose another --node-id, "
            "or wait until that node is known to be down"
        )
    return None


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
