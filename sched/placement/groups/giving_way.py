"""Which of two prompts ends when each waits for blocks that the other holds: no prompts wait in a circle. Pure.

A group has *begun* on a node where its part has computed something, and where what other nodes computed has arrived. It
waits there for the requests that hold the blocks it needs. All nodes know one order of groups: by class, then by the id
of the attempt. A part that has begun waits only for those behind it; if a part of a group before it holds blocks here,
its own group ends and gives all blocks back. So the last group in the order that has begun waits for no other; it is
computed, and so on up to the first.

- A part that has not begun (it may hold a known prefix) gives its blocks to one that has and comes before it. So the
  first part of a group may wait for any other part, and of two groups that meet on two nodes only the later one ends.
- Blocks into which other nodes write, for a request that decodes here, are held until those nodes have computed its
  prompt, which may wait for a part. So no part waits for them.
- A prompt without a group holds blocks too, on its decode node. If that node computes prompts as well, it must not wait
  on its prefill node for blocks into which other nodes write: its attempt ends (engine/core/seats.py). After two such
  ends one node does all of it (engine/front/groups.py), and then it holds nothing while it waits.
- So all other requests end by what their own node does.

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
    after = [one for one in holders if one.part and one.has_blocks and not one.begun and part.before(one)]
    idle = sorted(after, key=lambda one: (one.rank, one.id), reverse=True)
    return [one.id for one in idle] if part.begun else []


def ends(part: Holder, holders: Iterable[Holder]) -> bool:
    """Whether the group of `part`, which could compute now and lacks blocks, ends instead of waiting for `holders`: all
    other requests on its node."""
    return any(one.has_blocks and (one.arrives or (part.begun and one.part and one.before(part))) for one in holders)
