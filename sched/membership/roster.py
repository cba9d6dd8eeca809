"""Who is in the cluster: the merge rule of statements about nodes, and the rumours still worth telling.

The roster keeps the newest (incarnation, status) heard of each node, so two nodes that have heard the same statements,
in any order and any number of times, hold the same roster. That is so for incarnations which the node itself has given;
those that strangers plant half a circle away (sched/membership/serial.py) it outbids.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from hashlib import blake2b

from sched.membership.member import Member, Rng, Status, Verdict, supersedes
from sched.membership.packet import encode_update


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
        self._here: dict[str, Member] = {}
        self._here_list: list[Member] | None = None
        self._changed_at: dict[str, float] = {}
        self.fingerprint = 0  # equal in two rosters that hold the same nodes here in the same state

    def get(self, node_id: str) -> Member | None:
        return self._members.get(node_id)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def here(self) -> list[Member]:
        """Alive and suspected nodes by id. Not to be changed: the same list until one of them changes."""
        if self._here_list is None:
            self._here_list = sorted(self._here.values(), key=lambda member: member.node_id)
        return self._here_list

    def here_ids(self) -> Collection[str]:
        return self._here.keys()

    def sample(self, rng: Rng, count: int, but: str = "") -> list[Member]:
        """Up to `count` random nodes that are here."""
        here = self.here()
        drawn = rng.sample(here, min(count + (but in self._here), len(here)))
        return [member for member in drawn if member.node_id != but][:count]

    def gone(self) -> list[Member]:
        """Nodes that died without leaving: a partition may give them back."""
        return [member for member in self._members.values() if member.status is Status.DEAD]

    def at(self, address: tuple[str, int]) -> list[Member]:
        """Nodes here that are said to live at `address`."""
        return [member for member in self._here.values() if member.address == address]

    def merge(self, now: float, statement: Member | Verdict) -> Change | None:
        """Take in a statement; None if it is not news, or a verdict on a node never heard of."""
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
        """Drop the nodes that have been dead or gone since before `time`."""
        for node_id, member in list(self._members.items()):
            if not member.here and self._changed_at[node_id] < time:
                del self._members[node_id], self._changed_at[node_id]


def fingerprint_of(member: Member) -> int:
    """64 bits of a member's name and state; a roster's fingerprint is the exclusive or of these."""
    state = f"{member.node_id} {member.life} {member.incarnation} {int(member.status)}"
    return int.from_bytes(blake2b(state.encode(), digest_size=8).digest(), "little")


class Rumours:
    """Updates to piggyback, each told a bounded number of times, least told first.

    Per node the newest statement, and beside a suspicion those that confirm it.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], tuple[int, bytes]] = {}  # (node id, source) -> times told, encoded update

    def __len__(self) -> int:
        return len(self._told)

    def add(self, update: Member | Verdict, beside: bool = False) -> None:
        """Start telling `update`; unless it stands beside what was told of that node before, that is outdated."""
        if not beside:
            for key in [key for key in self._told if key[0] == update.node_id]:
                del self._told[key]
        source = update.source if isinstance(update, Verdict) else ""
        self._told[update.node_id, source] = (0, encode_update(update))

    def take(self, room_bytes: int, limit: int) -> list[bytes]:
        """Updates that fit into `room_bytes` (a comma each included), counted as told once more; `limit` ends one."""
        taken: list[bytes] = []
        if not self._told:
            return taken
        for key, (times, update) in sorted(self._told.items(), key=lambda item: item[1][0]):
            if len(update) + 1 > room_bytes:
                continue
            room_bytes -= len(update) + 1
            taken.append(update)
            if times + 1 >= limit:
                del self._told[key]
            else:
                self._told[key] = (times + 1, update)
        return taken
