"""Errors between two nodes, for callers of the channel and the transfer engine."""

from __future__ import annotations

from typing import Any

ONE_KEY = "one of the two nodes has a cluster key and the other has none: give both the same --cluster-key-file"
OTHER_KEY = "the two nodes have no cluster key in common: give both the same --cluster-key-file"


class PeerLost(ConnectionError):
    """The peer is unreachable, or the connection to it broke before the answer arrived."""


class PeerRefused(ConnectionError):
    """One side refused the connection; the text is its reason."""


class RemoteError(Exception):
    """The peer's handler answered with an error. Raised inside a handler, it travels to the caller."""

    def __init__(self, reason: str, code: str = "error", facts: dict[str, Any] | None = None) -> None:
        """`facts`: JSON-ready, for callers that do more than show the reason."""
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.facts = facts or {}


class TransferError(Exception):
    """A transfer was refused or cannot be done: unknown region, span out of bounds, no usable transport."""
