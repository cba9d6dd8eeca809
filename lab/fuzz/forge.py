"""Gossip packets of a stranger who knows the protocol and the names of the nodes. Their counters are at the ends of
their range. Mutated bytes rarely get that far, because name, length and checksum must all be right. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from lab.fuzz.mutate import EDGES
from sched.gossip.cells import SUMMARY
from sched.gossip.digest import LANES, CuckooDigest, Delta, pages_of
from sched.gossip.record import NodeRecord, node_key
from sched.membership.member import Address, Member, Status, Verdict
from sched.membership.packet import Kind, Message, encode_message, seal

NAMES = ("n1", "n2", "n3")


def number(rng: Random, bits: int = 32) -> int:
    """A number at or near an end or the middle of the range, or a small one."""
    edge = rng.choice((*EDGES, 1 << bits - 1, 0, 0))
    return (edge + rng.choice((0, 0, 1, -1, rng.randrange(300)))) % (1 << bits)


def packet(rng: Random, tag: int, info: dict[str, Any], at: Address) -> bytes:
    """A packet that passes every check except those of its content."""
    kind = rng.choice((*BODIES, Kind.SWIM))
    if kind is Kind.SWIM:
        return encode_message(tag, _message(rng, info, at))
    return seal(kind, tag, BODIES[kind](rng))


def _message(rng: Random, info: dict[str, Any], at: Address) -> Message:
    name, incarnation = rng.choice(NAMES), number(rng)
    statements = (
        Verdict(name, incarnation, rng.choice(list(Status)), rng.choice(NAMES)),
        Member(name, at, "", ("prefill",), incarnation, rng.choice(list(Status)), info, number(rng)),
    )
    return Message(
        rng.choice(("ping", "ack", "ask", "nack", "gossip", "compare", "sync", "synced", "welcome")),
        rng.choice(("n2", "n3")),
        number(rng),
        seq=number(rng, 64),
        target=rng.choice(NAMES),
        address=at,
        page=number(rng, 16),
        pages=max(2, number(rng, 16)),
        fingerprint=number(rng, 64),
        updates=(rng.choice(statements),),
    )


def _key(rng: Random) -> int:
    return node_key(rng.choice(NAMES))


def _held(rng: Random) -> bytes:
    return b"".join(struct.pack("<QII", _key(rng), number(rng), number(rng)) for _ in range(rng.randint(1, 4)))


def _changes(rng: Random) -> bytes:
    buckets, base = 1 << rng.randint(1, 10), number(rng)
    slots = np.array([rng.randrange(buckets * LANES) << 12 | rng.getrandbits(12) for _ in range(5)], np.uint32)
    delta = Delta(number(rng), base, (base + 1) % (1 << 32), buckets, slots)
    return _key(rng).to_bytes(8, "little") + delta.pack()


def _copy(rng: Random) -> bytes:
    """A complete digest of a few keys."""
    digest = CuckooDigest(1, rng.choice((1, 40)))
    for _ in range(5):
        digest.add(rng.getrandbits(64))
    digest.take_delta()
    slots = np.concatenate([page.slots for page in digest.pages()])
    return _key(rng).to_bytes(8, "little") + next(pages_of(number(rng), number(rng), slots)).pack()


def _records(rng: Random) -> bytes:
    return b"".join(
        NodeRecord(
            node=_key(rng),
            incarnation=number(rng),
            version=number(rng),
            waiting=number(rng, 16),
            max_running=number(rng, 16),
            blocks_total=number(rng),
            flags=number(rng, 16),
            work_s=rng.choice((0.0, 1e-45, 3e38)),
            age_s=rng.choice((0.0, 3.4e38)),
            prefill_a1=rng.choice((0.0, 1e-45, 3e38)),
        ).pack()
        for _ in range(rng.randint(1, 3))
    )


def _rows(rng: Random) -> bytes:
    return struct.pack("<QH", number(rng, 64), number(rng, 16)) + struct.pack("<2I", number(rng), number(rng))


def _orders(rng: Random) -> bytes:
    entries = b"".join(struct.pack("<QQ", _key(rng), number(rng, 64)) for _ in range(rng.randint(0, 3)))
    return struct.pack("<QQ", number(rng, 64), number(rng, 64)) + entries


def _cells(rng: Random) -> bytes:
    row = np.zeros(1, SUMMARY)
    row["bits"], row["cell"] = rng.choice((0, 1, 16, 255)), number(rng, 16)
    for name in ("running", "nodes", "waiting", "free_seats", "blocks_free", "blocks_total"):
        row[name] = number(rng, 8 * SUMMARY[name].itemsize)
    for name in ("age_s", "work_min_s", "work_mean_s", "prefill_tokens_per_s"):
        row[name] = rng.choice((0.0, 1e-45, 3.4e38))
    return row.tobytes()


def _ages(rng: Random) -> bytes:
    return struct.pack("<HBBf", number(rng, 16), 1, 0, rng.choice((0.0, -1.0, float("nan"), 3e38)))


BODIES: dict[Kind, Callable[[Random], bytes]] = {
    Kind.HELD: _held,
    Kind.CHANGES: _changes,
    Kind.COPY: _copy,
    Kind.DELTA: _records,
    Kind.SUMMARY: _rows,
    Kind.PICK: _rows,
    Kind.DIGEST: _orders,
    Kind.WANT: lambda rng: _key(rng).to_bytes(8, "little"),
    Kind.CELLS: _cells,
    Kind.CELL_AGES: _ages,
}
