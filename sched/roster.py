"""Who is in the cluster: the merge rule of statements about nodes, and the rumours still worth telling.

The roster is a join-semilattice: it keeps the greatest (incarnation, status) heard of each node, so two nodes that
have heard the same statements, in any order and any number of times, hold the same roster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sched.member import Member, Status, Verdict
from sched.packet import encode_update


@dataclass(frozen=True, slots=True)
class Change:
    """What a statement did to one entry."""

    before: Member | None
    after: Member

    @property
    def restarted(self) -> bool:
        """Another process under the same name, seen before the death of the first one was."""
        return self.before is not None and self.before.life != self.after.life

    def cause(self, statement: Member | Verdict) -> str:
        """Why the node went down, `statement` being what changed the entry."""
        if self.restarted:
            return "restarted"
        if self.after.status is Status.LEFT:
            return "left"
        source = statement.source if isinstance(statement, Verdict) else "the cluster"
        return f"dead: found by {source}"


class Roster:
    """Entries of all other nodes, the dead included until they are forgotten."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._changed_at: dict[str, float] = {}

    def get(self, node_id: str) -> Member | None:
        return self._members.get(node_id)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def here(self) -> list[Member]:
        """Alive and suspected nodes."""
        return [member for member in self._members.values() if member.here]

    def gone(self) -> list[Member]:
        """Nodes that died without leaving: a partition may give them back."""
        return [member for member in self._members.values() if member.status is Status.DEAD]

    def at(self, address: tuple[str, int]) -> list[Member]:
        """Nodes here that are said to live at `address`."""
        return [member for member in self.here() if member.address == address]

    def merge(self, now: float, statement: Member | Verdict) -> Change | None:
        """Take in a statement; None if it is not news, or a verdict on a node never heard of."""
        before = self._members.get(statement.node_id)
        if isinstance(statement, Verdict):
            if before is None:
                return None
            after = replace(before, incarnation=statement.incarnation, status=statement.status)
        else:
            after = statement
        if before is not None and after.order <= before.order:
            return None
        self._members[after.node_id] = after
        self._changed_at[after.node_id] = now
        return Change(before, after)

    def forget_before(self, time: float) -> None:
        """Drop the nodes that have been dead or gone since before `time`."""
        for node_id, member in list(self._members.items()):
            if not member.here and self._changed_at[node_id] < time:
                del self._members[node_id], self._changed_at[node_id]


class Rumours:
    """Updates to piggyback: the newest statement per node, each told a bounded number of times, least told first."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, bytes]] = {}  # node id -> times told, encoded update

    def __len__(self) -> int:
        return len(self._told)

    def add(self, update: Member | Verdict) -> None:
        """Start telling `update`; what was told of that node before is outdated."""
        self._told[update.node_id] = (0, encode_update(update))

    def take(self, room_bytes: int, limit: int) -> list[bytes]:
        """Updates that fit into `room_bytes` (a comma each included), counted as told once more; `limit` ends one."""
        taken: list[bytes] = []
        for node_id, (times, update) in sorted(self._told.items(), key=lambda item: item[1][0]):
            if len(update) + 1 > room_bytes:
                continue
            room_bytes -= len(update) + 1
            taken.append(update)
            if times + 1 >= limit:
                del self._told[node_id]
            else:
                self._told[node_id] = (times + 1, update)
        return taken
