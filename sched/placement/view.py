"""The known state of the nodes, in columns: a decision evaluates all nodes in a dozen vector operations.

A view is built once per change of the gossiped state and serves many decisions. Each decision charges its work to the
chosen node in place, so that the next one sees it (LSQ, reference/scheduling.md).

Prompts and decodes of one node delay each other, which no estimate knows. *Tolls* stand for that: a prompt counts more
where requests decode; a decode counts more where prompts wait, and on a node that has no request, so that decodes stay
together. Prompts and decodes then part by themselves while there is room, and share all nodes when there is none. Nodes
of one role have no toll (--placement-tolls).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from sched.gossip.load_word import ROLE_BITS, STAGES
from sched.gossip.state import Records
from sched.membership.member import Member, Rng
from sched.placement.demand import MAX_OUTPUT_TOKENS
from sched.placement.links import Lines, Links, Paths, Place, Vector
from sched.placement.record_table import COLUMNS, Table, table_of

QUEUE_FULL = "queue full"
TOO_LONG = "prompt longer than its KV memory"

TOLL_OF_PROMPT = 0.125
"""Share of a prompt's own time that its toll is, per request that has a seat on the node; the simulator counts those
that decode."""

PROMPT_TOLL_MOST = 4.0
"""Largest such share: a prefix that is cached on a busy node must still count."""

TOLL_OF_QUEUE = 20.0
"""Seconds that the toll is per second of queued prompts: a decode lasts longer than this queue, and more prompts
follow."""

TOLL_OF_FIRST = 1.0
"""Share of its own time that the toll of the first decode is: other nodes take it until their steps have doubled, or
the hand-over takes as long."""

CACHED = ("address", "least_blocks", "_takers", "takers", "_decode_columns", "decode_order", "near")
"""Properties that a view computes once from its table."""

ABLE = ("prefills", "decodes", "stages")
"""What each node can do, a flag per node."""

Flags = npt.NDArray[np.bool_]


@lru_cache
def _role_bits(roles: tuple[str, ...]) -> int:
    return sum(ROLE_BITS[role] for role in set(roles) & ROLE_BITS.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The known state of one node at present."""

    node_id: str
    roles: tuple[str, ...]
    wait_s: float = 0.0  # until its accepted prefill work is done
    waiting: int = 0  # queued requests
    running: int = 0
    queued_tokens: int = 0  # prefill tokens not yet computed
    prefill: tuple[float, float, float]  # coefficients of its PrefillModel
    free_blocks: int = 0
    total_blocks: int = 0
    step_s: float = 0.0  # decode step if one more request joined
    step_soon_s: float = 0.0  # if it joined when its prefill is done
    step_alone_s: float = 0.0  # if nothing else decoded there; 0 = not known
    decode_s: float = 0.0  # a typical decode there, first to last token
    age_s: float = 0.0  # age of this state
    nic_in: float = 0.0  # share of its network in use
    nic_out: float = 0.0
    stages: bool = True  # whether it can compute some of the layers of a prompt

    @property
    def column(self) -> tuple[float, ...]:
        """The node's column in a view's table. The view fills in open_at, closed_decode and tolled."""
        return (
            *self.prefill, 0.0, self.wait_s, 0.0, self.waiting, self.running, self.queued_tokens, self.free_blocks,
            self.total_blocks, self.step_s, self.step_soon_s, self.step_alone_s, self.decode_s, self.age_s, 0.0,
        )  # fmt: skip


class View:
    """Columns of length N over the nodes; times are on the clock of `now`. `matched` in other files has the same order.

    table [17, N]    a row for each of COLUMNS
    prefill [3, N]   coefficients of the nodes' prefill models, the first rows of the table
    powers [3]       1, n, n^2 of the current prompt, the factors of the coefficients; scratch memory, shared by copies
    work_until       time at which the accepted prefill work will be done
    open_at          work_until, but infinite for nodes that take no prompt: another role, or a full queue
    closed_decode    infinite for nodes that take no decodes, otherwise 0
    tolled           1 for nodes that prefill and decode, if tolls count, otherwise 0
    prefills, decodes, stages    flags: the node prefills, decodes, can compute some of the layers of a prompt
    nics [2, N]      shares of the nodes' networks that receive and that send; views may share them: never in place
    """

    prefills: Flags
    decodes: Flags
    stages: Flags
    a0: Vector
    a1: Vector
    a2: Vector
    open_at: Vector
    work_until: Vector
    closed_decode: Vector
    waiting: Vector
    running: Vector
    queued_tokens: Vector
    free_blocks: Vector
    total_blocks: Vector
    step_s: Vector
    step_soon_s: Vector
    step_alone_s: Vector
    decode_s: Vector
    age_s: Vector
    tolled: Vector
    nics: Table

    def __init__(
        self,
        now: float,
        nodes: Sequence[Candidate],
        links: Links,
        max_waiting: int,
        expected_arrivals: float = 0.0,
        *,
        tolls: bool = True,
    ) -> None:
        """`expected_arrivals`: requests that the cluster has probably placed since these records were written."""
        self._begin(links, max_waiting, expected_arrivals, tolls)
        columns = np.array([node.column for node in nodes], dtype=np.float64).reshape(-1, len(COLUMNS))
        self._fill(
            now,
            [node.node_id for node in nodes],
            np.ascontiguousarray(columns.T),
            np.array(["prefill" in node.roles for node in nodes], dtype=bool),
            np.array(["decode" in node.roles for node in nodes], dtype=bool),
            np.array([node.stages for node in nodes], dtype=bool),
        )
        self.nics = np.array([(node.nic_in, node.nic_out) for node in nodes], dtype=np.float64).reshape(-1, 2).T

    @classmethod
    def of_records(
        cls,
        now: float,
        members: Sequence[Member],
        records: Records,
        links: Links,
        max_waiting: int,
        expected_arrivals: float = 0.0,
        *,
        tolls: bool = True,
    ) -> View:
        """A view of `members`, each with a row of `records` (sched/gossip/record.py), at time `now`."""
        view = cls.__new__(cls)  # the table is made from arrays, not from candidates
        view._begin(links, max_waiting, expected_arrivals, tolls)
        told = np.where(records["flags"] == 0, np.uint16(0xFFFF), records["flags"])
        able = np.array([_role_bits(member.roles) for member in members], dtype=np.uint16) & told
        prefills, decodes = (able & np.uint16(ROLE_BITS[role]) != 0 for role in ("prefill", "decode"))
        stages = told & np.uint16(STAGES) != 0
        view._fill(now, [member.node_id for member in members], table_of(records), prefills, decodes, stages)
        view.nics = np.array((records["nic_in"], records["nic_out"])) / 255.0
        return view

    def _begin(self, links: Links, max_waiting: int, expected_arrivals: float, tolls: bool) -> None:
        self._links, self.max_waiting = links, max_waiting
        self.expected_arrivals, self._tolls = expected_arrivals, tolls
        self.powers = np.ones(3)

    def _fill(self, now: float, ids: list[str], table: Table, prefills: Flags, decodes: Flags, stages: Flags) -> None:
        """Take a table with relative times; computes open_at, closed_decode and tolled."""
        self.ids, self.prefills, self.decodes, self.stages = ids, prefills, decodes, stages
        self._attach(table)
        self.work_until += now
        full = self.waiting >= self.max_waiting
        self.open_at[:] = np.where(prefills & ~full, self.work_until, np.inf)
        self.closed_decode[:] = np.where(decodes & ~full, 0.0, np.inf)
        self.tolled[:] = prefills & decodes & self._tolls
        self._handover: dict[str, Lines] = {}
        self._fetch: dict[float, Lines] = {}

    def _attach(self, table: Table) -> None:
        self.table, self.prefill = table, table[:3]
        vars(self).update(zip(COLUMNS, table, strict=True))
        self.none = np.zeros(len(self.ids))
        self._forget()

    def _forget(self) -> None:
        for cached in CACHED:
            vars(self).pop(cached, None)

    def __len__(self) -> int:
        return len(self.ids)

    def prompt_tolls(self) -> Vector:
        """[N] The toll of a prompt as a share of its own time."""
        return np.minimum(TOLL_OF_PROMPT * self.running, PROMPT_TOLL_MOST) * self.tolled

    def queue_tolls_s(self) -> Vector:
        """[N] The toll of the queue on a decode in seconds. It counts the queue in tokens, because the rest of a step
        of decodes is work too."""
        return TOLL_OF_QUEUE * (self.a1 * self.queued_tokens) * self.tolled

    def first_tolls(self) -> Vector:
        """[N] The toll of the first decode as a share of its own time."""
        return np.where(self.running == 0.0, TOLL_OF_FIRST, 0.0) * self.tolled

    def fetch(self, token_bytes: float) -> Lines:
        """(latency_s, seconds per token) of loading tokens of that many bytes from the pool into each node."""
        if token_bytes not in self._fetch:
            latency_s, per_byte_s = self._links.fetch(self.ids)
            self._fetch[token_bytes] = latency_s, per_byte_s * token_bytes
        return self._fetch[token_bytes]

    @cached_property
    def address(self) -> int:
        """Address of eight int64 for compiled code: the table, the number of nodes, a byte per node (whether it
        prefills), `decode_order` as two columns and its length, `takers` and their number."""
        assert self.table.flags.c_contiguous
        prefills, (order, free), takers = np.ascontiguousarray(self.prefills), self._decode_columns, self._takers
        table, flags, fastest, room, able = (one.ctypes.data for one in (self.table, prefills, order, free, takers))
        words = np.array([table, len(self.ids), flags, fastest, room, len(order), able, len(takers)], dtype=np.int64)
        self._described = words, prefills  # keeps them alive as long as the address
        return int(words.ctypes.data)

    @cached_property
    def least_blocks(self) -> float:
        """KV blocks of the smallest node."""
        return float(self.total_blocks.min(initial=np.inf))

    @cached_property
    def _takers(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.open_at < np.inf).astype(np.int64)

    @cached_property
    def takers(self) -> list[int]:
        """Prefill nodes that had room in the queue when this was first read."""
        found: list[int] = self._takers.tolist()
        return found

    @cached_property
    def _decode_columns(self) -> tuple[npt.NDArray[np.int64], Vector]:
        token_s = self.step_s + self.step_s * self.first_tolls() + self.queue_tolls_s() / MAX_OUTPUT_TOKENS
        order = np.argsort(token_s + self.closed_decode, kind="stable")
        order = order[self.closed_decode[order] == 0].astype(np.int64)
        return order, self.free_blocks[order]

    @cached_property
    def decode_order(self) -> list[tuple[int, float]]:
        """(node, free blocks) of the decode nodes with room in the queue, fastest first; a request of MAX_OUTPUT_TOKENS
        pays the tolls."""
        order, free = self._decode_columns
        return list(zip(order.tolist(), free.tolist(), strict=True))

    @cached_property
    def near(self) -> dict[Place, list[int]]:
        """Decode nodes with room in the queue, fastest first, by each part of the network that they are in, such as
        (pod,), (pod, rack) and (pod, rack, host); empty if no node tells its place."""
        found: dict[Place, list[int]] = {}
        if places := self._links.places:
            for i, _ in self.decode_order:
                place = places.get(self.ids[i], ())
                for level in range(1, len(place) + 1):
                    found.setdefault(place[:level], []).append(i)
        return found

    def near_decode(self, i: int, blocks: int, rng: Rng) -> int | None:
        """A decode node as near to node `i` as possible with room for `blocks` more; None if none is known."""
        place = self._links.places.get(self.ids[i], ())
        for level in range(len(place), 0, -1):
            if roomy := [j for j in self.near.get(place[:level], ()) if j != i and self.free_blocks[j] >= blocks]:
                return rng.choice(roomy)
        return None

    def handover(self, source: str) -> Lines:
        if source not in self._handover:
            self._handover[source] = self._links.handover(source, self.ids)
        return self._handover[source]

    def forget_transfers(self) -> None:
        """Ask the links again: they have learned since; for long-lived views, such as a simulator's."""
        self._handover, self._fetch = {}, {}

    def fetch_each(self) -> Paths:
        """`fetch` in seconds per byte, for few nodes."""
        return self._links.fetch_each(self.ids)

    def handover_each(self, source: str) -> Paths:
        """`handover`, for few nodes."""
        return self._links.handover_each(source, self.ids)

    @cached_property
    def index(self) -> dict[str, int]:
        return {node_id: i for i, node_id in enumerate(self.ids)}

    def copy(self) -> View:
        """A copy that can be charged and aged separately."""
        view = copy(self)
        view._attach(self.table.copy())
        return view

    def at(self, table: Table, links: Links) -> View:
        """A view of the same nodes with this table and these links."""
        view = copy(self)
        view._attach(table)
        view._links, view._handover, view._fetch = links, {}, {}
        return view

    def only(self, indices: Sequence[int]) -> View:
        """A view of these nodes, in this order, that shares no memory with this one."""
        chosen = np.asarray(indices, dtype=np.intp)
        view = copy(self)
        view.ids = [self.ids[i] for i in indices]
        vars(view).pop("index", None)
        for name in ABLE:
            setattr(view, name, getattr(self, name)[chosen])
        view.nics = self.nics.take(chosen, axis=1)
        view._attach(self.table.take(chosen, axis=1))
        view._handover, view._fetch = {}, {}
        return view

    def joined_with(self, other: View) -> View:
        """A view of this view's nodes followed by those of `other`."""
        view = copy(self)
        view.ids = self.ids + other.ids
        vars(view).pop("index", None)
        for name in ABLE:
            setattr(view, name, np.concatenate((getattr(self, name), getattr(other, name))))
        view.nics = np.concatenate((self.nics, other.nics), axis=1)
        view._attach(np.concatenate((self.table, other.table), axis=1))
        view._handover, view._fetch = {}, {}
        return view

    def keep(self, indices: Sequence[int], old: View, places: Sequence[int]) -> None:
        """Copy the state of `old` at `places` to the nodes at `indices`."""
        self.table[:, indices] = old.table[:, places]
        for name in ABLE:
            flags = getattr(self, name).copy()  # copies of a view share them
            flags[indices] = getattr(old, name)[places]
            setattr(self, name, flags)
        self.nics = self.nics.copy()
        self.nics[:, indices] = old.nics[:, places]
        self._forget()

    def queue(self, i: int, until: float, waiting: int, tokens: int) -> None:
        """Set the prefill queue of node `i`; for long-lived views, such as a simulator's."""
        self.work_until[i], self.waiting[i], self.queued_tokens[i] = until, waiting, tokens
        self.open_at[i] = until if self.prefills[i] and waiting < self.max_waiting else np.inf

    def charge(self, now: float, node_id: str, seconds: float, tokens: int = 0) -> None:
        """Add `seconds` and `tokens` of prefill, just sent to the node, to this view."""
        i = self.index.get(node_id)
        if i is None:
            return
        added = max(0.0, now - self.work_until[i]) + seconds
        self.work_until[i] += added
        self.open_at[i] += added
        self.queued_tokens[i] += tokens
        self.waiting[i] += 1
        if self.waiting[i] >= self.max_waiting:
            self.open_at[i] = self.closed_decode[i] = np.inf

    def wait(self, i: int, now: float, seconds: float) -> float:
        """Node `i` is busy for at least `seconds` more. Returns by how many seconds that exceeds the known work."""
        known = float(self.work_until[i])
        added = max(0.0, now + seconds - known)
        self.work_until[i] += added
        self.open_at[i] += added
        return min(seconds, added)

    def close(self, node_id: str) -> None:
        """Exclude the node from prefill, unless it is the last one that takes prompts."""
        i = self.index.get(node_id)
        if i is not None and np.isfinite(self.open_at).sum() > 1:
            self.open_at[i] = np.inf

    def obstacle(self, i: int, num_tokens: int, block_size: int) -> str:
        """The reason why node `i` cannot take a prompt; empty if it can."""
        if self.total_blocks[i] * block_size <= num_tokens:
            return TOO_LONG
        return QUEUE_FULL if self.waiting[i] >= self.max_waiting else ""

    def too_long(self, num_tokens: int, block_size: int) -> Vector | None:
        """Infinite for nodes on which the prompt never fits, otherwise 0; None if it fits on all nodes."""
        if self.least_blocks * block_size > num_tokens:
            return None
        return np.where(self.total_blocks * block_size <= num_tokens, np.inf, 0.0)
