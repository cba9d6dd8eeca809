"""The members of the cluster: the merge rule for statements about nodes, and the rumours still to spread.

The roster keeps the newest (incarnation, status) of each node, so two nodes that have received the same statements, in
any order and any number of times, hold the same roster. This holds for incarnations issued by the node itself; if a
stranger forges one half a circle away (sched/membership/serial.py), the node outbids it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from hashlib import blake2b

from sched.membership.member import Member, Rng, Status, Verdict, supersedes
from sched.membership.packet import encode_update


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one entry by a statement."""

    before: Member | None
    after: Member

    @property
    def restarted(self) -> bool:
        """Whether another process has taken the name before the first one was known to be dead."""
        return self.before is not None and self.before.life != self.after.life

    def cause(self, statement: Member | Verdict) -> str:
        """Why the node went down; `statement` changed the entry."""
        if self.restarted:
            return "restarted"
        if self.after.status is Status.LEFT:
            return "left"
        source = statement.source if isinstance(statement, Verdict) else "the cluster"
        return f"dead: found by {source}"


class Roster:
    """Entries of all other nodes, including dead ones until they are forgotten."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._here: dict[str, Member] = {}
        self._here_list: list[Member] | None = None
        self._changed_at: dict[str, float] = {}
        self.fingerprint = 0  # equal in rosters with the same members in the same state

    def get(self, node_id: str) -> Member | None:
        return self._members.get(node_id)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def here(self) -> list[Member]:
        """Alive and suspected nodes, sorted by id. Do not modify the list: it is reused until a node changes."""
        if self._here_list is None:
            self._here_list = sorted(self._here.values(), key=lambda member: member.node_id)
        return self._here_list

    def here_ids(self) -> Collection[str]:
        return self._here.keys()

    def sample(self, rng: Rng, count: int, but: str = "") -> list[Member]:
        """Up to `count` random alive or suspected nodes, without node `but`."""
        here = self.here()
        drawn = rng.sample(here, min(count + (but in self._here), len(here)))
        return [member for member in drawn if member.node_id != but][:count]

    def gone(self) -> list[Member]:
        """Nodes that died without leaving; they may return when a partition heals."""
        return [member for member in self._members.values() if member.status is Status.DEAD]

    def at(self, address: tuple[str, int]) -> list[Member]:
        """Alive or suspected nodes at `address`."""
        return [member for member in self._here.values() if member.address == address]

    def merge(self, now: float, statement: Member | Verdict) -> Change | None:
        """Merge a statement. Returns None if it is not newer, or is a verdict on an unknown node."""
        before = self._members.get(statement.node_id)
        if isinstance(statement, Verdict):
            if before is None:
                return None
            after = replace(before, incarnation=statement.incarnation, status=statement.status)
        else:
            after = statement
        if before is not None and not supersedes(after.order, before.order):
            return None
        self._members[after.node_id] = after
        self._changed_at[after.node_id] = now
        self._place(before, after)
        return Change(before, after)

    def _place(self, before: Member | None, after: Member) -> None:
        self._here_list = None
        if before is not None and before.here:
            self.fingerprint ^= fingerprint_of(before)
        if after.here:
            self.fingerprint ^= fingerprint_of(after)
            self._here[after.node_id] = after
        else:
            self._here.pop(after.node_id, None)

    def forget_before(self, time: float) -> None:
        """Drop nodes that have been dead or gone since before `time`."""
        for node_id, member in list(self._members.items()):
            if not member.here and self._changed_at[node_id] < time:
                del self._members[node_id], self._changed_at[node_id]


def fingerprint_of(member: Member) -> int:
    """64-bit hash of a member's name and state; a roster's fingerprint is the XOR of these."""
    state = f"{member.node_id} {member.life} {member.incarnation} {int(member.status)}"
    return int.from_bytes(blake2b(state.encode(), digest_size=8).digest(), "little")


class Rumours:
    """Updates to piggyback on messages, each sent a bounded number of times, least sent first.

    It keeps the newest statement per node, and for a suspicion also the statements that confirm it.
    """

    def __init__(self) -> None:
        self._rumours: dict[tuple[str, str], tuple[int, bytes]] = {}  # (node id, source) -> times told, encoded update

    def __len__(self) -> int:
        return len(self._rumours)

    def add(self, update: Member | Verdict, keep_old: bool = False) -> None:
        """Start spreading `update`. Without `keep_old`, it replaces older updates about the same node."""
        if not keep_old:
            for key in [key for key in self._rumours if key[0] == update.node_id]:
                del self._rumours[key]
        source = update.source if isinstance(update, Verdict) else ""
        self._rumours[update.node_id, source] = (0, encode_update(update))

    def take(self, room_bytes: int, limit: int) -> list[bytes]:
        """Updates that fit into `room_bytes`, each with one byte for a comma. An update is dropped after `limit` calls
        have returned it."""
        taken: list[bytes] = []
        if not self._rumours:
            return taken
        for key, (times, update) in sorted(self._rumours.items(), key=lambda item: item[1][0]):
            if len(update) + 1 > room_bytes:
                continue
            room_bytes -= len(update) + 1
            taken.append(update)
            if times + 1 >= limit:
                del self._rumours[key]
            else:
                self._rumours[key] = (times + 1, update)
        return taken
