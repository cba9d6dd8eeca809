"""ReplicateConfig: the wishes of one put. docs/connect.md says which of them our pool follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ReplicateConfig:
    """Upstream's attributes and their defaults; others may be set, too. `replica_num`: copies of the value, on as many
    nodes. `with_hard_pin`: it is never evicted."""

    replica_num: int = 1
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: Sequence[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    group_ids: Sequence[str] | None = None
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
