"""Chooses the address (GID) of a device for its connections. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

V4_MAPPED = bytes(10) + b"\xff\xff"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a device's table, which contains the addresses of all its ports."""

    index: int  # in the table of its port
    port: int
    raw: bytes
    routable: bool  # RoCE v2


def choose(table: Iterable[Gid], port: int, index: int | None = None) -> Gid:
    """The entry `index` of this port; without an index, RoCE v2 over IPv4 is preferred, because it is routable. Raises
    ValueError, whose text names the missing entry."""
    mine = [gid for gid in table if gid.port == port and index in (None, gid.index)]
    if not mine:
        which = "any address (GID)" if index is None else f"a GID of index {index} (--rdma-gid-index)"
        raise ValueError(f"{which} on port {port}" + (": is its network interface up?" if index is None else ""))
    return min(mine, key=lambda gid: (not gid.routable, gid.raw[:12] != V4_MAPPED, gid.index))
