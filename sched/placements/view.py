"""What is known of the nodes, in columns: a decision looks at all of them in a dozen vector operations.

A view is built once per change of the gossiped state and serves many decisions. What one decision adds, its own work
on the chosen node, is charged in place, so the next one sees it (LSQ, reference/scheduling.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sched.load_word import ROLE_BITS
from sched.member import Member
from sched.placements.links import Lines, Links, Vector
from sched.state import NodeRecord

QUEUE_FULL = "queue full"
TOO_LONG = "prompt longer than its KV memory"

SLOW = 1.5
"""Measured over predicted step time from which a node counts as slow (reference/scheduling.md section 6)."""

MOVING = (
    "work_until", "waiting", "running", "queued_tokens", "free_blocks", "step_s", "open_at", "closed_decode",
)  # fmt: skip
"""Columns of a View that are written in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A node as the acceptor knows it: its record as of now."""

    node_id: str
    roles: tuple[str, ...]
    wait_s: float = 0.0  # until prefill work accepted so far is done
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
    age_s: float = 0.0  # of what is said here

    @classmethod
    def of(
        cls, member: Member, record: NodeRecord, claimed_s: float = 0.0, ahead: Sequence[float] | None = None
    ) -> Candidate:
        """`record` as of now, see ClusterView.records; `claimed_s`: work announced to the node beside it; `ahead`:
        (step_soon_s, step_alone_s, decode_s) as the node itself predicts them. A node whose steps take much longer
        than its models say is taken to be as much slower in everything, until the models have followed."""
        slow = record.residual if record.residual > SLOW else 1.0
        step_s = record.decode_step_s * slow
        soon_s, alone_s, decode_s = ahead or (step_s, 0.0 if record.running else step_s, 0.0)
        return cls(
            node_id=member.node_id,
            roles=tuple(role for role in member.roles if not record.flags or record.flags & ROLE_BITS[role]),
            wait_s=(record.work_s + claimed_s) * slow,
            waiting=record.waiting,
            running=record.running,
            queued_tokens=record.queued_tokens,
            prefill=(slow * record.prefill_a0, slow * record.prefill_a1, slow * record.prefill_a2),
            free_blocks=record.free_blocks,
            total_blocks=record.blocks_total,
            step_s=step_s,
            step_soon_s=soon_s,
            step_alone_s=alone_s,
            decode_s=decode_s,
            age_s=record.age_s,
        )


class View:
    """Columns over nodes, all of length N; times are on the clock of `now`, `matched` elsewhere is in this order.

    prefill [3, N]   coefficients of the nodes' prefill models
    work_until       when the prefill work accepted so far will be done
    open_at          the same, infinite where no prompt can be sent: another role, or a full queue
    closed_decode    infinite where nothing can be decoded, else 0
    """

    def __init__(
        self,
        now: float,
        nodes: Sequence[Candidate],
        links: Links,
        max_waiting: int,
        expected_arrivals: float = 0.0,
    ) -> None:
        """`expected_arrivals`: requests that the cluster has probably placed since these records were written."""
        self.nodes = list(nodes)
        self.ids = [node.node_id for node in nodes]
        self.expected_arrivals = expected_arrivals
        self.max_waiting = max_waiting
        self._links = links
        self._handover: dict[str, Lines] = {}
        self._fetch: dict[int, Lines] = {}
        self.work_until = now + _column(node.wait_s for node in nodes)
        self.waiting = _column(node.waiting for node in nodes)
        self.running = _column(node.running for node in nodes)
        self.queued_tokens = _column(node.queued_tokens for node in nodes)
        columns = np.array([node.prefill for node in nodes], dtype=np.float64).reshape(-1, 3)
        self.prefill: Vector = np.ascontiguousarray(columns.T)
        self.per_token, self.per_pair = self.prefill[1], self.prefill[2]
        self.free_blocks = _column(node.free_blocks for node in nodes)
        self.total_blocks = _column(node.total_blocks for node in nodes)
        self.step_s = _column(node.step_s for node in nodes)
        self.prefills = np.array(["prefill" in node.roles for node in nodes], dtype=bool)
        self.decodes = np.array(["decode" in node.roles for node in nodes], dtype=bool)
        self.least_blocks = float(self.total_blocks.min(initial=np.inf))
        self.none = np.zeros(len(self.ids))
        self._close()

    def __len__(self) -> int:
        return len(self.ids)

    def fetch(self, token_bytes: int) -> Lines:
        """(latency_s, seconds per token) of loading from the pool into each node."""
        if token_bytes not in self._fetch:
            latency_s, per_byte_s = self._links.fetch(self.ids)
            self._fetch[token_bytes] = latency_s, per_byte_s * token_bytes
        return self._fetch[token_bytes]

    @cached_property
    def decode_order(self) -> list[int]:
        """Nodes that decode and have room in the queue, the fastest first."""
        order = np.argsort(self.step_s + self.closed_decode, kind="stable")
        return [i for i in order.tolist() if self.closed_decode[i] == 0]

    def handover(self, source: str) -> Lines:
        if source not in self._handover:
            self._handover[source] = self._links.handover(source, self.ids)
        return self._handover[source]

    @cached_property
    def index(self) -> dict[str, int]:
        return {node_id: i for i, node_id in enumerate(self.ids)}

    def copy(self) -> View:
        """The same nodes, to be charged and aged by itself; what never changes of them is shared."""
        view = copy(self)
        for name in MOVING:
            setattr(view, name, getattr(self, name).copy())
        vars(view).pop("decode_order", None)
        return view

    def only(self, indices: Sequence[int]) -> View:
        """A view of these nodes, in this order, that shares nothing with this one."""
        chosen = np.asarray(indices, dtype=np.intp)
        view = copy(self)
        view.__dict__ = {
            name: value[..., chosen] if isinstance(value, np.ndarray) else value for name, value in vars(self).items()
        }
        view.nodes, view.ids = [self.nodes[i] for i in indices], [self.ids[i] for i in indices]
        view.per_token, view.per_pair = view.prefill[1], view.prefill[2]
        view._handover, view._fetch = {}, {}
        view.least_blocks = float(view.total_blocks.min(initial=np.inf))
        for cached in ("decode_order", "index"):
            vars(view).pop(cached, None)
        return view

    def keep(self, indices: Sequence[int], old: View) -> None:
        """Of these nodes take what `old`, a view of the same nodes, says."""
        for name in MOVING:
            getattr(self, name)[indices] = getattr(old, name)[indices]
        for name in ("prefills", "decodes"):  # shared between views: replaced instead of written to
            column = getattr(self, name).copy()
            column[indices] = getattr(old, name)[indices]
            setattr(self, name, column)

    def queue(self, i: int, until: float, waiting: int, tokens: int) -> None:
        """What node `i` has to prefill now; for a view that is kept, as a simulator's."""
        self.work_until[i], self.waiting[i], self.queued_tokens[i] = until, waiting, tokens
        self.open_at[i] = until if self.prefills[i] and waiting < self.max_waiting else np.inf

    def charge(self, now: float, node_id: str, seconds: float, tokens: int = 0) -> None:
        """So much prefill was just sent to this node; counts until the next view is built."""
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

    def close(self, node_id: str) -> None:
        """Send no prompt to this node, unless it is the last that takes any."""
        i = self.index.get(node_id)
        if i is not None and np.isfinite(self.open_at).sum() > 1:
            self.open_at[i] = np.inf

    def obstacle(self, i: int, num_tokens: int, block_size: int) -> str:
        """Why node `i` cannot take a prompt, empty if it can."""
        if self.total_blocks[i] * block_size <= num_tokens:
            return TOO_LONG
        return QUEUE_FULL if self.waiting[i] >= self.max_waiting else ""

    def too_long(self, num_tokens: int, block_size: int) -> Vector | None:
        """Infinite where a prompt never fits; None when it fits everywhere."""
        if self.least_blocks * block_size > num_tokens:
            return None
        return np.where(self.total_blocks * block_size <= num_tokens, np.inf, 0.0)

    def _close(self) -> None:
        full = self.waiting >= self.max_waiting
        self.open_at = np.where(self.prefills & ~full, self.work_until, np.inf)
        self.closed_decode = np.where(self.decodes & ~full, 0.0, np.inf)


def _column(values: object) -> Vector:
    return np.fromiter(values, dtype=np.float64)  # type: ignore[call-overload, no-any-return]
