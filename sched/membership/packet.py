"""Datagrams of the gossip planes: a 12-byte header that rejects foreign and damaged packets, then the body.

    magic "Mk" | version u8 | kind u8 | tag u32 | crc32 of the body u32 | body          little-endian, <= 1400 bytes

The tag is derived from the cluster's root key. Packets of another cluster are not parsed, except join requests, which
get a refusal with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from zlib import crc32

import orjson

from sched.membership.member import Address, Member, Verdict, number, text

PACKET_BYTES = 1400
"""Fits every Ethernet path without fragmentation."""

VERSION = 2
_header = struct.Struct("<2sBBII")  # magic, version, kind, tag, checksum
_covered = struct.Struct("<BI")
BODY_BYTES = PACKET_BYTES - _header.size
MESSAGE_BYTES = 400
"""Space for a message without its updates: names and hosts have at most `member.TEXT_BYTES` bytes."""

UPDATE_BYTES = 900
"""Largest encoded member entry."""


class PacketError(Exception):
    """The datagram must be dropped; `str` is the short reason, a counter's name."""


class Kind(IntEnum):
    SWIM = 1  # membership, JSON: `Message`
    DIGEST = 2  # state: versions by key, in a range of keys (sched/gossip/exchange.py)
    DELTA = 3  # state: records
    WANT = 4  # state: keys of nodes whose records are wanted
    SUMMARY = 5  # state: versions by row
    PICK = 6  # state: rows that are wanted
    HELD = 7  # digests: states held (sched/gossip/digest_exchange.py)
    CHANGES = 8  # digests: a delta
    COPY = 9  # digests: a page of a full copy
    CELL_AGES = 10  # cells: how old the summaries held are (sched/gossip/cells.py)
    CELLS = 11  # cells: summaries


_KINDS = frozenset(Kind)


def tag_of(member: Member) -> int:
    """The header's tag in the cluster that `member` belongs to."""
    return crc32(str(member.info.get("root", "")).encode())


def seal(kind: Kind, tag: int, body: bytes) -> bytes:
    """The datagram. Raises ValueError if it would exceed PACKET_BYTES."""
    if len(body) > BODY_BYTES:
        raise ValueError(f"a packet body of {len(body)} bytes exceeds the limit of {BODY_BYTES}")
    return _header.pack(b"Mk", VERSION, kind, tag, _checksum(kind, tag, body)) + body


def unseal(datagram: bytes) -> tuple[Kind, int, bytes]:
    """(kind, tag, body). Raises PacketError."""
    if not _header.size <= len(datagram) <= PACKET_BYTES:
        raise PacketError("size")
    magic, version, kind, tag, checksum = _header.unpack_from(datagram)
    if magic != b"Mk":
        raise PacketError("magic")
    if version != VERSION:
        raise PacketError("version")
    if kind not in _KINDS:
        raise PacketError("kind")
    body = datagram[_header.size :]
    if _checksum(kind, tag, body) != checksum:
        raise PacketError("checksum")
    return Kind(kind), tag, body


def _checksum(kind: int, tag: int, body: bytes) -> int:
    """Covers the kind and tag too: kinds differ by one bit, and a page must not be parsed as a list."""
    return crc32(body, crc32(_covered.pack(kind, tag)))


@dataclass(frozen=True, slots=True)
class Message:
    """One membership message.

    ping -> ack by `seq`; ask = "probe `target` at `address` for me" -> ack or nack; gossip = only updates; join ->
    welcome pages, or refuse with `reason`; compare carries the roster's `fingerprint`; if it differs, the answer is
    sync -> synced: pages of the whole member list.
    """

    kind: str
    sender: str
    incarnation: int
    seq: int = 0
    target: str = ""
    address: Address | None = None
    page: int = 0
    pages: int = 1
    reason: str = ""
    fingerprint: int = 0
    updates: tuple[Member | Verdict, ...] = field(default=())


MESSAGE_KINDS = frozenset(
    {"ping", "ack", "ask", "nack", "gossip", "join", "welcome", "refuse", "compare", "sync", "synced"}
)


def encode_message(tag: int, message: Message, rumours: Iterable[bytes] = ()) -> bytes:
    """The datagram of `message` with its updates and `rumours` (updates already encoded by `encode_update`)."""
    wire: dict[str, Any] = {"kind": message.kind, "from": message.sender, "inc": message.incarnation}
    if message.seq:
        wire["seq"] = message.seq
    if message.target:
        wire["target"] = message.target
    if message.address:
        wire["at"] = list(message.address)
    if message.pages > 1:
        wire["page"], wire["pages"] = message.page, message.pages
    if message.reason:
        wire["reason"] = message.reason
    if message.fingerprint:
        wire["sum"] = message.fingerprint
    updates: list[Any] = [update.to_wire() for update in message.updates]
    updates += [orjson.Fragment(rumour) for rumour in rumours]
    if updates:
        wire["updates"] = updates
    return seal(Kind.SWIM, tag, orjson.dumps(wire))


def encode_update(update: Member | Verdict) -> bytes:
    return orjson.dumps(update.to_wire())


def decode_message(body: bytes) -> Message:
    """Raises PacketError("malformed") for anything that `encode_message` cannot produce."""
    try:
        wire = orjson.loads(body)
        if wire["kind"] not in MESSAGE_KINDS:
            raise ValueError("unknown kind")
        return Message(
            kind=wire["kind"],
            sender=text(wire["from"]),
            incarnation=number(wire["inc"], 32),
            seq=number(wire.get("seq", 0), 64),
            target=text(wire["target"]) if "target" in wire else "",
            address=_address(wire.get("at")),
            page=number(wire.get("page", 0), 16),
            pages=number(wire.get("pages", 1), 16),
            reason=str(wire.get("reason", "")),
            fingerprint=number(wire.get("sum", 0), 64),
            updates=tuple(_update(update) for update in wire.get("updates", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PacketError("malformed") from None


def _address(wire: Any) -> Address | None:
    if wire is None:
        return None
    host, port = wire
    return text(host), number(port, 16)


def _update(wire: dict[str, Any]) -> Member | Verdict:
    update = Verdict.from_wire(wire) if "by" in wire else Member.from_wire(wire)
    if len(encode_update(update)) > UPDATE_BYTES:
        raise ValueError("the update is too long to pass on")
    return update
