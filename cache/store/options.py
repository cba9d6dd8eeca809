"""How a Store keeps blocks and moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cache.homes.rendezvous import Members
from cache.protocol import Deadlines
from cache.store.job import MESSAGE_BLOCK_BYTES, MESSAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of one node's store. A transfer costs one or two messages more than blocks inside messages do."""

    block_bytes: int
    deadlines: Deadlines = field(default_factory=Deadlines)
    replicas: int = 1  # copies of every block
    repair_limit: float = 0.0  # bytes per second for moving blocks to where they belong; 0 = no limit
    message_block_bytes: int = MESSAGE_BLOCK_BYTES  # blocks up to this size travel in the messages themselves,
    message_call_bytes: int = MESSAGE_BYTES  # and larger ones if the whole call moves no more than this
    checksums: bool = True  # False: only the SSD tiers compute and compare them
    other_sites: Callable[[], Mapping[str, Members]] = dict  # the members of the pools of other sites, by site
