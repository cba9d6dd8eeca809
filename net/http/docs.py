"""GET /docs: the routes of /openapi.json as a page to read, without scripts and files of others."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Mooncake: API</title><link rel="icon" href="moon.svg">
<link rel="stylesheet" href="page.css"></head><body><main>
"""
TAIL = "</main></body></html>\n"


def page(document: Json) -> str:
    """HTML of an OpenAPI document: the routes with their summaries, and the fields of each body."""
    info, schemas = document["info"], document["components"]["schemas"]
    parts = [f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}. "]
    parts.append('<a href="openapi.json">openapi.json</a> has the types of all answers, and every rule.</p>')
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            name = f"{method.upper()} {path}"
            parts.append(f"<h2><code>{escape(name)}</code></h2><p>{escape(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                parts.append(_fields(schemas[_name(body["content"]["application/json"]["schema"])]))
    return HEAD + "\n".join(parts) + TAIL


def _fields(schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(kind))}</td>"
        f"<td>{'required' if name in required else escape(_default(kind))}</td></tr>"
        for name, kind in schema["properties"].items()
    )
    return f'<div class="scroll"><table><tr><th>field</th><th>type</th><th>default</th></tr>{rows}</table></div>'


def _kind(kind: Json) -> str:
    """'array of string or integer', 'Tool', 'auto | none | ...'"""
    if "$ref" in kind:
        return _name(kind)
    if "enum" in kind:
        return " | ".join(map(str, kind["enum"][:8])) + (" | ..." if len(kind["enum"]) > 8 else "")
    if "anyOf" in kind:
        return " or ".join(dict.fromkeys(_kind(one) for one in kind["anyOf"] if one.get("type") != "null"))
    found = kind.get("type", "any")
    name = " or ".join(found) if isinstance(found, list) else str(found)
    return f"{name} of {_kind(kind['items'])}" if "items" in kind else name


def _default(kind: Json) -> str:
    told = [kind, *kind.get("anyOf", ())]
    return next((str(one["default"]) for one in told if one.get("default") is not None), "")


def _name(reference: Json) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
