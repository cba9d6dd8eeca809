"""Transfer times between nodes, learned from the transfers that requests report and from the rail rates of nodes.
Bytes are those that moved: encoded ones, where KV is encoded on its way. Blocks of the pool that are rounded where it
pays (--pool-dtype int4-auto) count with the bytes of exact ones: a demand does not know the form of each.

The estimate of a path is as fast as its past transfers, but no faster than its rails are now: the regressions forget
after dozens of transfers, while rails measure every MiB (net/transfer/common/rails.py). An unused path is as fast as
the paths between nodes that are equally far apart, where nodes tell their places (--network-place), and no faster than
its rails. Without places it is as fast as its rails. If its rails are unknown too, it gets the mean of all paths.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from sched.cost import TransferModel
from sched.placement.links import Lines, Paths, Place, columns, distance


class Forms(Protocol):
    """Knows in which form the KV of a request moves, if the nodes of a cluster have unlike blocks."""

    def between(self, source: str, target: str) -> tuple[float, bool]:
        """(bytes that move between two nodes, for a byte in the form of the cluster; whether they are converted)"""


class MeasuredLinks:
    """One model per path, and the last reported bytes/s of its rails. `forms`: None while all nodes have like blocks;
    else a byte of a hand-over costs as many bytes as move, and the seconds in which the source converts them."""

    def __init__(self) -> None:
        self.forms: Forms | None = None
        self.places: Mapping[str, Place] = {}
        self._far: dict[int, TransferModel] = {}  # of hand-overs, by distance
        self._conversions: dict[str, float] = {}  # seconds per converted byte, by source
        self._fetch, self._handover = TransferModel(), TransferModel()
        self._fetches: dict[str, TransferModel] = {}
        self._handovers: dict[str, dict[str, TransferModel]] = {}  # by source and target
        self._fetch_rails: dict[str, float] = {}
        self._handover_rails: dict[str, dict[str, float]] = {}  # by source and target

    # --- estimates

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return columns(self.fetch_each(nodes))

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return columns(self.handover_each(source, nodes))

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return _lines(nodes, self._fetches, self._fetch_rails, self._fetch)

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        models, rails = self._handovers.get(source, {}), self._handover_rails.get(source, {})
        if self._far and (here := self.places.get(source)) is not None:
            models = {node: found for node in nodes if (found := models.get(node) or self._between(here, node))}
        lines = _lines(nodes, models, rails, self._handover)
        if self.forms is not None:
            for i, node in enumerate(nodes):
                factor, converts = self.forms.between(source, node)
                added_s = self._conversions.get(source, 0.0) if converts else 0.0
                lines[2 * i + 1] = factor * (lines[2 * i + 1] + added_s)
        return lines

    def _between(self, here: Place, node: str) -> TransferModel | None:
        """The model of all paths as long as this one."""
        there = self.places.get(node)
        return None if there is None else self._far.get(distance(here, there))

    # --- measurements

    def reported(self, node: str, fetch: float, to: Mapping[str, float], converts: float = 0.0) -> None:
        """`node` reports the bytes/s of its rails: the mean over its peers (0 = unknown), and to single peers; and of
        the KV that it converts."""
        if converts > 0:
            self._conversions[node] = 1 / converts
        if fetch > 0:
            self._fetch_rails[node] = fetch
        if to:
            self._handover_rails.setdefault(node, {}).update({peer: rate for peer, rate in to.items() if rate > 0})

    def fetched(self, node: str, nbytes: int, seconds: float) -> None:
        """A transfer from the pool into `node` has ended."""
        if nbytes and seconds > 0:  # else the path is as unused as before
            _observe((self._fetches.setdefault(node, TransferModel()), self._fetch), nbytes, seconds)

    def handed_over(self, source: str, node: str, nbytes: int, seconds: float) -> None:
        if nbytes and seconds > 0:
            models = self._handovers.setdefault(source, {})
            seen = [models.setdefault(node, TransferModel()), self._handover]
            here, there = self.places.get(source), self.places.get(node)
            if here is not None and there is not None:
                seen.append(self._far.setdefault(distance(here, there), TransferModel()))
            _observe(seen, nbytes, seconds)

    def learn(self, events: Iterable[dict[str, Any]], decode: str) -> None:
        """Learn from the timeline events of a request that decodes on `decode`."""
        for event in events:
            detail = event["detail"]
            if event["event"] == "kv_moved":
                self.handed_over(event["node"], decode, detail["bytes"], detail["seconds"])
            # Not the path alone, if a disk was read; not the path to the pool of its site, if another site sent blocks.
            elif event["event"] == "prefix_fetched" and "ssd" not in detail["tiers"] and "site" not in detail:
                self.fetched(event["node"], detail["bytes"] + detail.get("saved_bytes", 0), detail["seconds"])

    def forget(self, node: str) -> None:
        """Forget a node that is gone; a different node may return under its name."""
        self._fetches.pop(node, None)
        self._fetch_rails.pop(node, None)
        self._conversions.pop(node, None)
        self._handovers.pop(node, None)
        self._handover_rails.pop(node, None)
        for models in self._handovers.values():
            models.pop(node, None)
        for rails in self._handover_rails.values():
            rails.pop(node, None)


def _observe(models: Iterable[TransferModel], nbytes: int, seconds: float) -> None:
    for model in models:
        model.observe(nbytes, seconds)


def _lines(
    nodes: Sequence[str], models: Mapping[str, TransferModel], rails: Mapping[str, float], common: TransferModel
) -> Paths:
    lines = array("d")
    for node in nodes:
        model, rate = models.get(node), rails.get(node)
        latency_s, per_byte_s = (model or common).regression.coefficients
        if rate is not None:
            per_byte_s = 1 / rate if model is None else max(per_byte_s, 1 / rate)
        lines.append(latency_s)
        lines.append(per_byte_s)
    return lines
