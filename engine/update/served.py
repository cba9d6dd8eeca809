"""Which weights a cluster serves, and which of two statements about that is newer. Pure.

A cluster begins with generation 0, the weights of --model; each replacement counts one more. Nodes that missed one
follow the newest statement they hear. If two halves of a cluster that could not reach each other replaced their weights
separately, both have the same generation; the greater key wins everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY_HEX = 32


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """`key`: hex of what the content hashes to, "" for generation 0. The others are what the client said: where the
    tensors are, and its own name for these weights."""

    generation: int = 0
    key: str = ""
    prefix: str = ""
    tenant: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what no node would say."""
        if self.generation < 0 or len(self.key) != (KEY_HEX if self.generation else 0):
            raise ValueError(f"generation {self.generation} with a key of {len(self.key)} digits")
        bytes.fromhex(self.key)

    @property
    def content(self) -> bytes:
        """As in Request.weights: b"" for the weights of --model."""
        return bytes.fromhex(self.key)

    @property
    def tag(self) -> int:
        """One byte that nearly always differs for other weights: for the load record. It differs for any two of sixteen
        generations in a row; 0 for the weights of --model."""
        return (self.generation & 15) << 4 | (int(self.key[-1], 16) if self.key else 0)

    def newer(self, than: ServedWeights) -> bool:
        return (self.generation, self.key) > (than.generation, than.key)


def served_of(cluster: Mapping[str, Any] | None) -> ServedWeights:
    """What the answer to GET /cluster says; generation 0 if it says nothing. Raises ValueError."""
    told = (cluster or {}).get("weights") or {}
    try:
        return ServedWeights(*(told[name] for name in ("generation", "key", "prefix", "tenant", "version") if told))
    except (KeyError, TypeError) as error:
        raise ValueError(f"the cluster's weights are not in the expected form: {error!r}") from None
