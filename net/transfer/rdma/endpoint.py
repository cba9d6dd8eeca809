"""The description of a queue pair that each side of a connection sends to the other. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Travels as JSON. A card has two limits on READs and atomics of one queue pair, which need not be equal: how many
    it has under way (verbs: max_qp_init_rd_atom) and how many of the other side it answers at a time
    (max_qp_rd_atom)."""

    qp_num: int
    psn: int
    gid: str  # hex
    lid: int
    mtu: int
    reads: int
    answers: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Endpoint:
        """Raises ValueError for anything else."""
        try:
            numbers = {name: int(value[name]) for name in ("qp_num", "psn", "lid", "mtu", "reads", "answers")}
            endpoint = cls(gid=str(value["gid"]), **numbers)
            if len(bytes.fromhex(endpoint.gid)) != 16:
                raise ValueError("a GID has 16 bytes")
        except (KeyError, TypeError) as error:
            raise ValueError(f"no RDMA endpoint: {error}") from None
        return endpoint

    def depths(self, other: Endpoint) -> tuple[int, int]:
        """(READs and atomics that this side may have under way, of the other side's that it must answer at a time)."""
        return min(self.reads, other.answers), min(self.answers, other.reads)
