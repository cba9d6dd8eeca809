"""Cells: above a few hundred nodes, records and digests stay within a cell, and other cells get a summary. Pure.

A node's cell is given by the leading bits of its key, as few as keep every cell within the limit. All nodes that know
the same members compute the same cells, and a cell that grows too large splits in two. The members with the lowest keys
are the cell's delegates: they write its summary from their own view and send it to delegates of other cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sched.gossip.record import node_key
from sched.membership.events import SendPacket
from sched.membership.member import Address, Member, Preset, Rng
from sched.membership.packet import BODY_BYTES, Kind, PacketError, seal

DELEGATES = 3

SUMMARY = np.dtype(
    [
        ("cell", "<u2"),
        ("bits", "u1"),  # leading bits of the node key that identify the cell
        ("spare", "u1"),
        ("nodes", "<u2"),  # with a record
        ("running", "<u2"),
        ("age_s", "<f4"),  # since a delegate wrote it
        ("work_min_s", "<f4"),  # prefill work before a new request, at the least loaded node
        ("work_mean_s", "<f4"),
        ("prefill_tokens_per_s", "<f4"),  # of all nodes together
        ("waiting", "<u4"),
        ("free_seats", "<u4"),  # of the decode batches
        ("blocks_free", "<u4"),
        ("blocks_total", "<u4"),
    ]
)
_ages = np.dtype([("cell", "<u2"), ("bits", "u1"), ("spare", "u1"), ("age_s", "<f4")])
SUMMARIES = BODY_BYTES // SUMMARY.itemsize
FRESHER_S = 0.05
"""A node sends a summary if the receiver's one is older by more than this."""

Rows = npt.NDArray[np.void]


def bits_for(keys: npt.NDArray[np.uint64], limit: int) -> int:
    """Number of leading key bits that identify a cell: the least for which no cell exceeds `limit` nodes, at most
    16."""
    for bits in range(16):
        if bits == 0:
            most = keys.size
        else:
            most = int(np.bincount((keys >> np.uint64(64 - bits)).astype(np.intp)).max(initial=0))
        if most <= limit:
            return bits
    return 16


def cell_of(key: int, bits: int) -> int:
    return key >> (64 - bits) if bits else 0


def delegates(keys: Sequence[int]) -> list[int]:
    """The keys of the delegates among the members of one cell."""
    return sorted(keys)[:DELEGATES]


def summarise(cell: int, bits: int, records: Rows) -> Rows:
    """One row of SUMMARY over the current records of a cell (ClusterView.table)."""
    row = np.zeros(1, SUMMARY)
    known = records[records["version"] > 0]
    row["cell"], row["bits"], row["nodes"] = cell, bits, known.size
    if known.size:
        prefilling = known[known["prefill_a1"] > 0]
        row["work_min_s"], row["work_mean_s"] = known["work_s"].min(), known["work_s"].mean()
        row["prefill_tokens_per_s"] = (1 / prefilling["prefill_a1"]).sum() if prefilling.size else 0.0
        row["running"] = min(0xFFFF, int(known["running"].sum()))
        waiting = ("waiting_interactive", "waiting_standard", "waiting_batch")
        row["waiting"] = sum(int(known[name].sum()) for name in waiting)
        seats = known["max_running"].astype(np.int64) - known["running"]
        row["free_seats"] = np.maximum(0, seats).sum()
        free = known["blocks_total"].astype(np.int64) - known["blocks_used"]
        row["blocks_free"] = min(0xFFFFFFFF, int(np.maximum(0, free).sum()))
        row["blocks_total"] = min(0xFFFFFFFF, int(known["blocks_total"].sum(dtype=np.int64)))
    return row


class CellPlane:
    """Keeps the newest summary of every cell. Each period a node tells a few others the age of its summaries and
    receives newer ones.
    """

    def __init__(self, now: float, node_id: str, tag: int, preset: Preset, rng: Rng) -> None:
        self.counters: Counter[str] = Counter()  # summaries_taken, dropped_malformed
        self.next_at = now + rng.random() * preset.cell_period_s
        self._key = node_key(node_id)
        self._tag, self._preset, self._rng = tag, preset, rng
        self._bits = 0
        self._held: dict[int, tuple[Rows, float]] = {}  # by cell: (the received row, its time of arrival)

    def summaries(self, now: float) -> Rows:
        """SUMMARY rows of all known cells, aged, ordered by cell; empty while there is only one cell."""
        rows = [row for row, _ in self._held.values()]
        if not rows:
            return np.zeros(0, SUMMARY)
        found = np.concatenate(rows)
        found["age_s"] += np.maximum(0.0, now - np.array([since for _, since in self._held.values()]))
        return np.sort(found, order="cell")

    def tick(
        self, now: float, bits: int, mates: Sequence[Member], others: Collection[Member], records: Rows
    ) -> list[SendPacket]:
        """Call once per period. `mates`: the other members of this cell; `others`: all other members of the cluster;
        `records`: the cell's records."""
        self.next_at = now + self._preset.cell_period_s
        if bits != self._bits:
            self._bits, self._held = bits, {}
        if not bits:
            return []
        asked = self._rng.sample(mates, min(self._preset.state_fanout, len(mates)))
        cell = cell_of(self._key, bits)
        if self._key in delegates([self._key, *(node_key(mate.node_id) for mate in mates)]):
            self._held[cell] = summarise(cell, bits, records), now
            asked += self._foreign_delegates(bits, cell, others)
        body = self._ages(now)
        return [SendPacket(member.address, seal(Kind.CELL_AGES, self._tag, body)) for member in asked]

    def _foreign_delegates(self, bits: int, own: int, others: Collection[Member]) -> list[Member]:
        """One delegate each of a few random other cells."""
        cells: dict[int, list[tuple[int, Member]]] = {}
        for member in others:
            key = node_key(member.node_id)
            if (cell := cell_of(key, bits)) != own:
                cells.setdefault(cell, []).append((key, member))
        drawn = self._rng.sample(sorted(cells), min(self._preset.fanout, len(cells)))
        lowest = [sorted(cells[cell], key=lambda pair: pair[0])[:DELEGATES] for cell in drawn]
        return [self._rng.choice(candidates)[1] for candidates in lowest]

    def _ages(self, now: float) -> bytes:
        held = self.summaries(now)
        ages = np.zeros(held.size, _ages)
        ages["cell"], ages["bits"], ages["age_s"] = held["cell"], held["bits"], held["age_s"]
        return ages[: BODY_BYTES // _ages.itemsize].tobytes()

    def receive(self, now: float, source: Address, kind: Kind, tag: int, body: bytes) -> list[SendPacket]:
        """Answer one packet. Never raises: invalid packets are counted and dropped."""
        try:
            if tag != self._tag:
                raise PacketError("foreign")
            if kind is Kind.CELL_AGES:
                return [SendPacket(source, packet) for packet in self._fresher(now, body)]
            self._take(now, body)
        except PacketError as error:
            self.counters[f"dropped_{error}"] += 1
        return []

    def _fresher(self, now: float, body: bytes) -> Iterator[bytes]:
        if len(body) % _ages.itemsize:
            raise PacketError("malformed")
        known = {(cell, bits): age for cell, bits, _, age in np.frombuffer(body, _ages).tolist()}
        held = self.summaries(now)
        names = zip(held["cell"].tolist(), held["bits"].tolist(), strict=True)
        theirs = np.array([known.get(name, np.inf) for name in names])
        sent = held[held["age_s"] + FRESHER_S < theirs] if held.size else held
        for start in range(0, sent.size, SUMMARIES):
            yield seal(Kind.CELLS, self._tag, sent[start : start + SUMMARIES].tobytes())

    def _take(self, now: float, body: bytes) -> None:
        if len(body) % SUMMARY.itemsize:
            raise PacketError("malformed")
        rows = np.frombuffer(body, SUMMARY)
        for name in ("age_s", "work_min_s", "work_mean_s", "prefill_tokens_per_s"):
            if not (np.isfinite(rows[name]) & (rows[name] >= 0)).all():
                raise PacketError("malformed")
        for row in rows[rows["bits"] == self._bits]:
            cell = int(row["cell"])
            if cell >> self._bits:
                raise PacketError("malformed")
            held = self._held.get(cell)
            if held is None or float(row["age_s"]) < float(held[0]["age_s"][0]) + now - held[1]:
                self._held[cell] = np.array([row], SUMMARY), now
                self.counters["summaries_taken"] += 1
