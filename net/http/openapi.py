"""GET /openapi.json: the routes of the app as an OpenAPI 3.1 document. Bodies are the models that check them.

`document` raises LookupError for a route without a line in OPERATIONS, so a new route cannot be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from net.http.drain import DrainBody
from net.http.page import ASSETS, TYPES
from net.http.schema import IGNORED, NEUTRAL, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Json = dict[str, Any]

JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    body: type[BaseModel] | None = None
    types: tuple[str, ...] = (JSON,)  # of a 200
    open: bool = False  # needs no key


# fmt: off
OPERATIONS = {
    "POST /v1/completions": Operation("Continue a prompt", CompletionBody, (JSON, EVENTS)),
    "POST /v1/chat/completions": Operation("Answer a conversation", ChatBody, (JSON, EVENTS)),
    "POST /v1/embeddings": Operation("Refused: this server generates text"),
    "GET /v1/models": Operation("The served model"),
    "GET /v1/models/{model}": Operation("The served model by its name"),
    "POST /tokenize": Operation("Token ids of a text or a conversation", TokenizeBody),
    "POST /detokenize": Operation("Text of token ids", DetokenizeBody),
    "GET /tokenizer_info": Operation("Special tokens and chat template"),
    "GET /health": Operation("Can this node serve?", open=True),
    "GET /version": Operation("Version of the server"),
    "GET /metrics": Operation("Prometheus metrics", types=(TEXT,), open=True),
    "GET /openapi.json": Operation("This document"),
    "GET /debug/state": Operation("Everything this node knows about itself"),
    "GET /debug/requests/{request_id}": Operation("Timeline of a request that this node accepted"),
    "GET /cluster": Operation("Members, roles and addresses"),
    "GET /live": Operation("The cluster as it is now, every node in its own words"),
    "GET /live/requests/{request_id}": Operation("Timeline of a request that any node accepted"),
    "POST /drain": Operation("Leave the cluster without dropping a request", DrainBody),
    "GET /drain": Operation("How far leaving has come"),
    "GET /": Operation("The live page", types=("text/html",), open=True),
} | {
    f"GET /{name}": Operation("A file of the live page", types=(TYPES[name[name.rindex("."):]],), open=True)
    for name in ASSETS
}
# fmt: on

ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(routes: Iterable[web.AbstractRoute], version: str, with_key: bool) -> Json:
    """The document of these routes. `with_key`: clients must send one. Raises LookupError."""
    paths: dict[str, Json] = {}
    for route in routes:
        if route.method == "HEAD":  # comes with every GET
            continue
        path = route.resource.canonical if route.resource is not None else ""
        name = f"{route.method} {path}"
        if name not in OPERATIONS:
            raise LookupError(f"{name} has no line in net/http/openapi.py")
        paths.setdefault(path, {})[route.method.lower()] = _operation(path, OPERATIONS[name], with_key)
    bodies = {operation.body for operation in OPERATIONS.values() if operation.body is not None}
    modes = [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)]
    _, schemas = models_json_schema(modes, ref_template=REFERENCE)  # type: ignore[arg-type]
    known = {body.__name__ for body in _subclasses(Body)}
    models = {name: _accepted(schema) if name in known else schema for name, schema in schemas["$defs"].items()}
    components: Json = {"schemas": models | {"Error": ERROR}}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Mooncake", "version": version, "description": "OpenAI-compatible, with vLLM's extensions"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(path: str, operation: Operation, with_key: bool) -> Json:
    error = {"description": "An error as OpenAI has them", "content": {JSON: {"schema": _reference("Error")}}}
    content = {kind: {"schema": {"type": "object"} if kind == JSON else {}} for kind in operation.types}
    described: Json = {
        "summary": operation.summary,
        "responses": {"200": {"description": operation.summary, "content": content}, "default": error},
    }
    if names := re.findall(r"{(\w+)}", path):
        schema = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if operation.body is not None:
        schema = _reference(operation.body.__name__)
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if with_key and not operation.open:
        described["security"] = [{"key": []}]
    return described


def _accepted(schema: Json) -> Json:
    """With what `served_fields` lets through: null for every optional field, fields that are ignored, and fields that
    may only ask for nothing."""
    required = set(schema.get("required", ()))
    properties = {
        name: field if name in required else {"anyOf": [field, {"type": "null"}]}
        for name, field in schema["properties"].items()
    }
    ignored: dict[str, Json] = {name: {} for name in sorted(IGNORED)}
    neutral: dict[str, Json] = {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}
    return {**schema, "properties": ignored | neutral | properties}


def _reference(model: str) -> Json:
    return {"$ref": REFERENCE.format(model=model)}


def _subclasses(kind: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
