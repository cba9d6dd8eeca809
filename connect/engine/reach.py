"""Reach: by which ways a program's transfers may go. Pure.

TransferEngine.initialize names the protocol and its devices; variables of the environment forbid ways:

    MC_FORCE_TCP          only TCP
    MC_GID_INDEX          RDMA: the index of the address (GID) of a device
    MOONCAKE_CMA=0        no copies from process to process on one host: the network card copies there, too
    MOONCAKE_HUGE_PAGES=0 registered memory stays in pages of the size that it has (connect/common/huge_pages.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Reach:
    """The ways of one program."""

    cma: bool = True  # copies from process to process on one host
    huge_pages: bool = True  # for these copies
    rdma: bool = False
    devices: Sequence[str] = ()  # empty: all
    gid_index: int | None = None

    @classmethod
    def of(cls, protocol: str, device_name: str, env: Mapping[str, str]) -> Self:
        """Raises ValueError for a MC_GID_INDEX that is no number."""
        if env.get("MC_FORCE_TCP"):
            return cls(cma=False, huge_pages=False)
        devices = tuple(name for part in device_name.split(",") if (name := part.strip()))
        gid_index = env.get("MC_GID_INDEX", "")
        try:
            index = int(gid_index) if gid_index else None
        except ValueError:
            raise ValueError(f"MC_GID_INDEX is {gid_index!r}, not a number") from None
        cma, rdma = env.get("MOONCAKE_CMA") != "0", protocol == "rdma"
        huge_pages = cma and not rdma and env.get("MOONCAKE_HUGE_PAGES") != "0"  # a card pins the pages that there are
        return cls(cma, huge_pages, rdma, devices, index)

    @property
    def order(self) -> Sequence[str]:
        """For net.transfer.engine.TransferEngine."""
        return ("rdma", "tcp") if self.rdma else ("tcp",)

    @property
    def options(self) -> Mapping[str, dict[str, Any]]:
        """For net.transfer.engine.TransferEngine."""
        return {"rdma": {"devices": self.devices, "gid_index": self.gid_index}} if self.rdma else {}
