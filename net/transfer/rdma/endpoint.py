"""The description of a queue pair that each side of a connection sends to the other. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

RANGES = {
    "qp_num": range(1 << 24),
    "psn": range(1 << 24),
    "lid": range(1 << 16),
    "mtu": range(1, 6),
    "reads": range(256),
    "answers": range(256),
}


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

    def __post_init__(self) -> None:
        """Raises ValueError: the verbs take integers of these sizes, and foreign bytes have said them."""
        for name, known in RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or value not in known:
                raise ValueError(f"not an RDMA endpoint: {name} is {value!r}, not of {known[0]} to {known[-1]}")
        if type(self.gid) is not str or len(bytes.fromhex(self.gid)) != 16:
            raise ValueError("not an RDMA endpoint: a GID has 16 bytes")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Endpoint:
        """Raises ValueError if `value` is not the JSON of an endpoint."""
        try:
            return cls(gid=value["gid"], **{name: value[name] for name in RANGES})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an RDMA endpoint: {error}") from None

    def depths(self, other: Endpoint) -> tuple[int, int]:
        """Concurrent READs and atomics: (those this side may send, those of the other side that it must answer)."""
        return min(self.reads, other.answers), min(self.answers, other.reads)
