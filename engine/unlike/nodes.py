"""Nodes of one cluster whose blocks differ, as placement sees them: how many bytes a hand-over moves.

KV moves in the form of the decode node (engine/handoff/converting.py). Demands count bytes in the form of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable

from cache.block import BlockGeometry
from engine.config.agreement import KvBlocks, kv_of
from sched.membership.member import Member


class UnlikeNodes:
    """The forms of `members`; cluster: the form of the pool."""

    def __init__(self, members: Iterable[Member], cluster: BlockGeometry) -> None:
        found = ((member.node_id, kv_of(member.info)) for member in members)
        self._kv: dict[str, KvBlocks] = {node: kv for node, kv in found if kv is not None}
        self._cluster = cluster
        sizes = [kv.block_size // cluster.block_size for kv in self._kv.values()]
        self.each = max([1, *sizes])
        """Blocks of the pool in the largest block of a node."""

    @property
    def any(self) -> bool:
        """Whether there are two forms, or one that is not the cluster's."""
        forms = {(kv.dtype, kv.block_size) for kv in self._kv.values()}
        return bool(forms - {(self._cluster.dtype, self._cluster.block_size)})

    def between(self, source: str, target: str) -> tuple[float, bool]:
        """See sched.placement.measured_links.Forms."""
        onto, mine = self._kv.get(target), self._kv.get(source)
        if onto is None or mine is None:
            return 1.0, False
        there = self._cluster.like(onto.dtype, onto.block_size)
        alike = (mine.dtype, mine.block_size) == (onto.dtype, onto.block_size)
        each = there.wire_bytes if alike else there.block_bytes
        base = self._cluster.wire_bytes / self._cluster.block_size
        return each / there.block_size / base, mine.dtype != onto.dtype
