"""Predicted transfers between nodes as columns: seconds = latency + bytes * seconds per byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sched.cost import TransferModel

Vector = npt.NDArray[np.float64]
Lines = tuple[Vector, Vector]
"""(latency_s, seconds per byte), one of each per node."""


class Links(Protocol):
    """Knows how fast KV moves."""

    def fetch(self, nodes: Sequence[str]) -> Lines:
        """From the pooled store into each of the nodes."""

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        """From the prefill node `source` to each of the nodes; what stands at `source` itself is not used."""


@dataclass(frozen=True, slots=True)
class UniformLinks:
    """All paths alike."""

    fetched: TransferModel
    handed_over: TransferModel

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return _alike(self.fetched, len(nodes))

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return _alike(self.handed_over, len(nodes))


def _alike(model: TransferModel, nodes: int) -> Lines:
    latency_s, per_byte_s = model.regression.coefficients
    return np.full(nodes, latency_s), np.full(nodes, per_byte_s)
