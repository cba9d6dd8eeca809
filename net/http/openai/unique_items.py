"""`uniqueItems` in JSON schemas: no grammar can enforce it, so it is a field that this server does not know."""

from __future__ import annotations

from typing import Any

KEYWORD = "uniqueItems"
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is an object of schemas by name."""
VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is no schema."""


def asks_for_unique_items(schema: Any) -> bool:
    """Whether a part of the schema demands unique items."""
    if isinstance(schema, list):
        return any(map(asks_for_unique_items, schema))
    if not isinstance(schema, dict):
        return False
    if schema.get(KEYWORD) is True:
        return True
    return any(asks_for_unique_items(part) for name, value in schema.items() for part in _schemas(name, value))


def without_unique_items(schema: Any, asked: bool) -> Any:
    """The schema without the keyword where it has no effect; with `asked` also where it demands something."""
    if isinstance(schema, list):
        return [without_unique_items(one, asked) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        if name == KEYWORD and (asked or value is False):
            continue
        if name in NAMED and isinstance(value, dict):
            kept[name] = {key: without_unique_items(one, asked) for key, one in value.items()}
        else:
            kept[name] = value if name in VALUES else without_unique_items(value, asked)
    return kept


def _schemas(name: str, value: Any) -> list[Any]:
    if name in VALUES:
        return []
    return list(value.values()) if name in NAMED and isinstance(value, dict) else [value]
