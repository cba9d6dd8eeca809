"""Transfer times between nodes, learnt from the transfers that requests report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sched.cost import TransferModel
from sched.placements.links import Lines, lines


class MeasuredLinks:
    """One model per path; a path nobody has used yet is taken to be like all others together."""

    def __init__(self) -> None:
        self._fetch, self._handover = TransferModel(), TransferModel()
        self._fetches: dict[str, TransferModel] = {}
        self._handovers: dict[tuple[str, str], TransferModel] = {}

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return lines([self._fetches.get(node, self._fetch) for node in nodes])

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return lines([self._handovers.get((source, node), self._handover) for node in nodes])

    def learn(self, events: Iterable[dict[str, Any]], decode: str) -> None:
        """Timeline events of a request that decodes on `decode`."""
        for event in events:
            detail = event["detail"]
            if event["event"] == "kv_moved":
                path = self._handovers.setdefault((event["node"], decode), TransferModel())
                models = (path, self._handover)
            elif event["event"] == "prefix_fetched":
                models = (self._fetches.setdefault(event["node"], TransferModel()), self._fetch)
            else:
                continue
            if detail["bytes"] and detail["seconds"] > 0:
                for model in models:
                    model.observe(detail["bytes"], detail["seconds"])
