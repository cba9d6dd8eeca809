"""How many values a JSON text may have, and how deep they may be nested. Pure."""

from __future__ import annotations

from typing import Any

MAX_VALUES = 300_000
"""Per body: at most 30 ms of parsing. A prompt of this many token ids exceeds every model's context."""

MAX_DEPTH = 100
"""Levels of lists and objects in a body, and in JSON text inside it: libraries that read it later stop at 128."""


def values_in(raw: bytes) -> int:
    """About the number of values in a JSON text; too many where strings have commas and brackets."""
    return raw.count(b",") + containers_in(raw)


def containers_in(raw: bytes) -> int:
    """At least the number of lists and objects in a JSON text."""
    return raw.count(b"[") + raw.count(b"{")


def deeper_than(levels: int, value: Any) -> bool:
    """Whether lists and objects in `value` are nested more than `levels` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        children = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for some in children for child in some if isinstance(child, dict | list)]
    return bool(level)
