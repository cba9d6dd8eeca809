"""The description of a queue pair that each side of a connection sends to the other. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Sent as JSON. A card has two limits on concurrent READs and atomics of one queue pair, which may differ: `reads`,
    those it has in flight (verbs: max_qp_init_rd_atom), and `answers`, those of the other side that it answers
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
        """Raises ValueError if `value` is not the JSON of an endpoint."""
        try:
            numbers = {name: int(value[name]) for name in ("qp_num", "psn", "lid", "mtu", "reads", "answers")}
            endpoint = cls(gid=str(value["gid"]), **numbers)
            if len(bytes.fromhex(endpoint.gid)) != 16:
                raise ValueError("a GID has 16 bytes")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an RDMA endpoint: {error}") from None
        return endpoint

    def depths(self, other: Endpoint) -> tuple[int, int]:
        """Concurrent READs and atomics: (those this side may send, those of the other side that it must answer)."""
        return min(self.reads, other.answers), min(self.answers, other.reads)
