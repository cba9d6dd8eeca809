"""Bytes that moved between a node and its peers during each interval, by rail, and new failures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_RAILS = 8
"""Rails of one interval that keep their names; the others are added up, because a node may have hundreds of peers."""
OTHERS = "other rails"

WAYS = {"shm": "shared memory", "tcp": "TCP", "rdma": "RDMA"}


class Moved:
    """Differences between successive rows of net.transfer.engine.TransferEngine.snapshot, which are sums since the
    node's start."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._seen: dict[tuple[str, ...], int] = {}

    def since_last(self, rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
        """(bytes by rail, failures by peer) since the last call, both without zeros. Failures are failed submissions
        and rails that broke."""
        moved: dict[str, int] = {}
        failures: dict[str, int] = {}
        for row in rows:
            peer = row["peer"]
            left = self._more((peer, "bytes"), row["bytes_read"] + row["bytes_written"])
            failed = self._more((peer, "failures"), row["failures"])
            for name, nbytes, broken in self._rails(row):
                moved[name] = moved.get(name, 0) + nbytes
                left, failed = left - nbytes, failed + broken
            if left > 0:  # without rails, or over none of those that are open now
                name = self._name(row, "")
                moved[name] = moved.get(name, 0) + left
            if failed:
                failures[peer] = failed
        return top({name: nbytes for name, nbytes in moved.items() if nbytes}, MAX_RAILS), failures

    def _rails(self, row: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """(name, bytes, breaks) of each rail."""
        for rail in row["rails"]:
            key = (row["peer"], rail.get("lane", ""), rail["rail"])
            nbytes = self._more((*key, "bytes"), rail["bytes"])
            yield self._name(row, rail["rail"]), nbytes, self._more((*key, "failures"), rail["failures"])

    def _more(self, key: tuple[str, ...], total: int) -> int:
        """The increase of a sum. A sum that became smaller began again at 0."""
        before = self._seen.get(key, 0)
        self._seen[key] = total
        return total - before if total >= before else total

    def _name(self, row: Mapping[str, Any], rail: str) -> str:
        way = WAYS.get(row["transport"], row["transport"] or "path closed")
        return f"{self._node_id} – {row['peer']}, {way} {rail}".rstrip()


def top(moved: Mapping[str, int], most: int) -> dict[str, int]:
    """The `most` largest by name; the sum of the rest as OTHERS."""
    names = sorted(moved, key=lambda name: (name == OTHERS, -moved[name]))
    kept = {name: moved[name] for name in names[:most]}
    if rest := sum(moved[name] for name in names[most:]):
        kept[OTHERS] = kept.get(OTHERS, 0) + rest
    return kept
