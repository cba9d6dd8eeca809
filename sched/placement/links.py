"""Predicted transfers between nodes as columns: seconds = latency + bytes * seconds per byte."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from sched.cost import TransferModel

Vector = npt.NDArray[np.float64]
Lines = tuple[Vector, Vector]
"""(latency_s, seconds per byte), one of each per node."""

Paths: TypeAlias = "array[float]"
"""latency_s and seconds per byte of each path, alternating. For few nodes: a numpy call costs as much as a node."""


Place = tuple[str, ...]
"""Where a node is in the network, from the core down, such as (pod, rack, host)."""


def distance(one: Place, other: Place) -> int:
    """Levels of the network between two nodes: 0 on the same host, more the higher the switch that they share."""
    shared = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        shared += 1
    return max(len(one), len(other)) - shared


class Links(Protocol):
    """Knows how fast KV moves."""

    @property
    def places(self) -> Mapping[str, Place]:
        """Of the nodes that tell theirs."""

    def fetch(self, nodes: Sequence[str]) -> Lines:
        """From the pooled store into each of the nodes."""

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        """From the prefill node `source` to each of the nodes; the entry of `source` itself is not used."""

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        """`fetch`, for few nodes."""

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        """`handover`, for few nodes."""


@dataclass(frozen=True, slots=True)
class UniformLinks:
    """All paths alike."""

    fetched: TransferModel
    handed_over: TransferModel

    @property
    def places(self) -> Mapping[str, Place]:
        return {}

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return _alike(self.fetched, len(nodes))

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return _alike(self.handed_over, len(nodes))

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return array("d", _line(self.fetched)) * len(nodes)

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        return array("d", _line(self.handed_over)) * len(nodes)


def _alike(model: TransferModel, nodes: int) -> Lines:
    latency_s, per_byte_s = _line(model)
    return np.full(nodes, latency_s), np.full(nodes, per_byte_s)


def _line(model: TransferModel) -> tuple[float, float]:
    latency_s, per_byte_s = model.regression.coefficients
    return latency_s, per_byte_s


def columns(paths: Paths) -> Lines:
    """A column of latencies and one of seconds per byte."""
    latency_s, per_byte_s = np.array(paths, dtype=np.float64).reshape(-1, 2).T.copy()
    return latency_s, per_byte_s
