"""JSON over HTTP to a node by URL, for the launcher and the tests. Blocking; one small function per verb."""

from __future__ import annotations

from typing import Any

from engine.observe.node_client import NoAnswer as RestError
from engine.observe.node_client import NodeClient

__all__ = ["RestError", "get", "post", "text"]


def get(url: str, key: str | None = None, timeout_s: float = 5.0) -> Any:
    """Decoded body of GET `url`. Raises RestError."""
    return NodeClient(url, key, timeout_s).get("")


def text(url: str) -> str:
    """Body of GET `url`. Raises RestError."""
    return NodeClient(url).text("")


def post(url: str, body: Any, key: str | None = None, timeout_s: float = 600.0) -> Any:
    """Decoded body of POST `url`. Raises RestError."""
    return NodeClient(url, key, timeout_s).post("", body)
