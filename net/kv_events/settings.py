"""--kv-events-config: where a node publishes its KV events, in vLLM's JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

WITHOUT_EFFECT = {"enable_kv_cache_events", "publisher", "max_queue_size"}
"""Fields of vLLM that choose no setting here. This publisher has no queue between the engine and the socket."""


@dataclass(frozen=True, slots=True)
class EventSettings:
    """An endpoint with `*` or `::`, or of ipc or inproc, is bound; the publisher connects to another one."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None  # always bound; None: missed batches are not sent again
    buffer_steps: int = 10_000  # batches kept for that
    hwm: int = 100_000  # batches that may wait for a slow subscriber; further ones are dropped for it
    topic: str = ""


def parse(text: str) -> EventSettings | None:
    """None if the JSON does not enable events. Raises ValueError, whose message names the field."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")
    known = {one.name for one in fields(EventSettings)}
    if unknown := sorted(given.keys() - known - WITHOUT_EFFECT):
        raise ValueError(f"has no field {unknown[0]!r}; it has {', '.join(sorted(known | WITHOUT_EFFECT))}")
    enabled = given.get("enable_kv_cache_events", False)
    _check(isinstance(enabled, bool), "enable_kv_cache_events", "true or false", enabled)
    publisher = given.get("publisher", "zmq" if enabled else "null")
    _check(publisher in ("zmq", "null"), "publisher", "zmq or null", publisher)
    if not enabled or publisher == "null":
        return None
    found = EventSettings(**{name: value for name, value in given.items() if name in known})
    _check(isinstance(found.endpoint, str) and "://" in found.endpoint, "endpoint", "like tcp://*:5557", found.endpoint)
    replay = found.replay_endpoint
    _check(
        replay is None or (isinstance(replay, str) and "://" in replay), "replay_endpoint", "like tcp://*:5558", replay
    )
    for name in ("buffer_steps", "hwm"):
        value = getattr(found, name)
        _check(type(value) is int and value > 0, name, "a positive whole number", value)
    _check(isinstance(found.topic, str), "topic", "a text", found.topic)
    return found


def _check(ok: bool, name: str, rule: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, not {value!r}")
