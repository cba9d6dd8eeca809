"""Which network cards are near which memory, and which cards of two nodes form a rail. Pure.

The cards that share the most PCI bridges with a GPU, at least the root complex of its socket, are near the GPU. The
cards of a NUMA node are near the node's memory. Without information, all cards are near. Slices use far rails only
while no near rail is up (net/transfer/common/rails.py).

A topology file (--topology-file, TOML or JSON) overrides the machine's information; every part is optional:

    [rails]                     # devices with the same number are joined; others: their index in --rdma-devices
    mlx5_0 = 0
    mlx5_1 = 1
    [numa]                      # virtual machines often do not report it
    mlx5_0 = 0
    [near]                      # for memory at a place: "numa:N" or "cuda:N"
    "numa:0" = ["mlx5_0"]
    "cuda:0" = ["mlx5_1"]
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NEAR, FAR = 0, 1


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card as the machine describes it."""

    name: str
    numa_node: int = -1  # -1: unknown
    bridges: tuple[str, ...] = ()  # PCI addresses from the root to the card


@dataclass(frozen=True, slots=True)
class Overrides:
    """A topology file."""

    rails: Mapping[str, int] = field(default_factory=dict)
    numa: Mapping[str, int] = field(default_factory=dict)
    near: Mapping[str, Sequence[str]] = field(default_factory=dict)


def parse(text: str, is_json: bool) -> Overrides:
    """Raises ValueError that names the mistake in the file."""
    try:
        tables = json.loads(text) if is_json else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(tables, dict) or set(tables) - {"rails", "numa", "near"}:
        raise ValueError("it may contain only the tables rails, numa and near")
    rails, numa = (_numbers(tables.get(name, {}), name) for name in ("rails", "numa"))
    if len(set(rails.values())) < len(rails):
        raise ValueError("two devices of [rails] have the same number")
    near = tables.get("near", {})
    for place, names in _table(near, "near").items():
        kind, _, number = place.partition(":")
        if kind not in ("numa", "cuda") or not number.isdigit():
            raise ValueError(f"[near] takes places like 'numa:0' and 'cuda:0', got {place!r}")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"[near] {place!r} needs a list of devices")
    return Overrides(rails, numa, near)


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] is not a table")
    return value


def _numbers(value: Any, name: str) -> dict[str, int]:
    for device, number in _table(value, name).items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"[{name}] {device} needs a number of at least 0, not {number!r}")
    return dict(value)


class Topology:
    """The cards in use, in the order of their rail numbers."""

    def __init__(self, nics: Sequence[Nic], overrides: Overrides | None = None) -> None:
        """nics: in the order of --rdma-devices."""
        given = overrides or Overrides()
        numbers = {nic.name: given.rails.get(nic.name, index) for index, nic in enumerate(nics)}
        self.rail_numbers = dict(sorted(numbers.items(), key=lambda item: item[1]))
        self._nics = {nic.name: nic for nic in nics}
        self._numa = {nic.name: given.numa.get(nic.name, nic.numa_node) for nic in nics}
        self._near = given.near

    @property
    def one_place(self) -> bool:
        """Whether all cards are equally near to all host memory, so that the place of memory does not matter."""
        return len(set(self._numa.values())) < 2 and not any(place.startswith("numa:") for place in self._near)

    def numa_node(self, name: str) -> int:
        """-1: unknown."""
        return self._numa[name]

    def near(self, place: str | None, gpu_bridges: Sequence[str] = ()) -> set[str]:
        """The cards near memory at `place`: 'numa:N' or 'cuda:N' (`gpu_bridges`: PCI addresses from the root complex to
        the GPU). For None and other places, all cards."""
        everything = set(self._nics)
        if place is None or not place.startswith(("numa:", "cuda:")):
            return everything
        if place in self._near and (chosen := everything & set(self._near[place])):
            return chosen
        if place.startswith("cuda:"):
            shared = {name: _shared(nic.bridges, gpu_bridges) for name, nic in self._nics.items()}
            most = max(shared.values(), default=0)
            return {name for name, count in shared.items() if count == most} if most else everything
        node = int(place.partition(":")[2])
        return {name for name, numa in self._numa.items() if numa == node} or everything

    def distances(self, names: Sequence[str], near: set[str]) -> list[int]:
        """NEAR or FAR for each of `names`."""
        return [NEAR if name in near else FAR for name in names]


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of bridges, from the root complex on, that two devices have in common."""
    count = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def pairs(ours: Mapping[str, int], theirs: Mapping[str, int]) -> list[tuple[str, str]]:
    """(device here, device there) for every rail number that both nodes have, in order of the numbers."""
    there = {number: name for name, number in theirs.items()}
    return [(name, there[number]) for name, number in sorted(ours.items(), key=lambda one: one[1]) if number in there]
