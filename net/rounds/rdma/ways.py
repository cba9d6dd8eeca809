"""How messages may go between this process and one of another host: flags, as far as they matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from net.rounds.rdma.offer import Offer
from net.transfer.common.topology import Overrides, Topology
from net.transfer.common.transport import Unusable
from net.transfer.rdma.places import nics
from net.transfer.rdma.transport import PLAINTEXT
from net.transfer.rdma.verbs import chosen_devices


@dataclass(frozen=True, slots=True)
class Ways:
    """`devices`: of --rdma-devices, in the order of the rails; none = all. `sealed_only`: bytes leave this host only
    encrypted."""

    transport: str = "auto"  # rdma = nothing else; tcp, shm = TCP between hosts
    devices: Sequence[str] = ()
    gid_index: int | None = None
    overrides: Overrides = field(default_factory=Overrides)
    sealed_only: bool = False

    def offer(self) -> Offer:
        """What this process says of itself, as of now."""
        only = self.transport == "rdma"
        if self.transport not in ("auto", "rdma"):
            return Offer(refused=f"--transport {self.transport}")
        if self.sealed_only:
            return Offer(refused=PLAINTEXT, only=only)
        try:
            found = nics(chosen_devices(self.devices))
        except Unusable as error:
            return Offer(refused=str(error), only=only)
        return Offer(Topology(found, self.overrides).rail_numbers, only=only)
