"""Which of two groups ends when each waits for blocks that the other holds: no groups wait in a circle. Pure.

A group has *begun* on a node where its part has computed something, and where what other nodes computed has arrived. It
waits there for the requests that hold the blocks it needs. All nodes know one order of groups: by class, then by the id
of the attempt. A part that has begun waits only for those behind it; if one before it holds blocks here, its group ends
and gives all blocks back. So the last group in the order that has begun waits for no other; it is computed, and so on
up to the first.

- A part that has not begun (it may hold a known prefix) gives its blocks to one that has. So the first part of a group
  may wait for any other part.
- Blocks into which other nodes write, for a request that decodes here, are held until those nodes have computed its
  prompt, which may wait for a part. So no part waits for them.
- All other requests end by what their own node does.

tests/engine/core/test_giving_way.py searches for circles in random clusters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """A request on one node."""

    id: str  # of the attempt, the same on all nodes
    rank: int  # of its class
    has_blocks: bool
    part: bool  # a part of a long prompt
    begun: bool  # a part: as above
    arrives: bool  # other nodes write its KV into its blocks

    def before(self, other: Holder) -> bool:
        """The order of groups."""
        return (self.rank, self.id) < (other.rank, other.id)


def in_the_way(part: Holder, holders: Iterable[Holder]) -> list[str]:
    """The ids of those that give their blocks to `part`, the first in the order last."""
    idle = [one for one in holders if part.begun and one.part and one.has_blocks and not one.begun]
    return [one.id for one in sorted(idle, key=lambda one: (one.rank, one.id), reverse=True)]


def ends(part: Holder, holders: Iterable[Holder]) -> bool:
    """Whether the group of `part`, which could compute now and lacks blocks, ends instead of waiting for `holders`: all
    other requests on its node."""
    before = (one for one in holders if one.has_blocks and (one.arrives or (part.begun and one.part and one.begun)))
    return any(one.arrives or one.before(part) for one in before)
