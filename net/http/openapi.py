"""GET /openapi.json: the routes of the app as an OpenAPI 3.1 document. Bodies are the models that validate them, plus
the rules of net/http/openai/rules.py; the answers come from net/http/common/answers.py.

`document` raises LookupError for a route without a line in OPERATIONS, so a new route cannot be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from net.http.anthropic.schema import CountBody, MessagesBody
from net.http.batches.schema import BatchBody
from net.http.common.answers import ANSWERS
from net.http.common.heads import SESSION_HEADER
from net.http.common.page import ASSETS, TYPES
from net.http.drain import DrainBody
from net.http.openai.fields import IGNORED, NEUTRAL, Known
from net.http.openai.responses_schema import ResponsesBody
from net.http.openai.routes import CLASS_HEADER, RESUME_HEADER
from net.http.openai.rules import FIELDS, REFERENCE, RULES
from net.http.openai.schema import SERVICE_CLASSES, Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from net.http.weights import UpdateWeightsBody

Json = dict[str, Any]

NULL: Json = {"type": "null"}
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"

IGNORED_TOOLS = {"FunctionTool": "function", "CustomTool": "custom"}
"""Tools of APIs in which tools have other types too -> the type that is served; the others are ignored."""


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    body: type[BaseModel] | None = None
    types: tuple[str, ...] = (JSON,)  # content types of a 200; empty: there is no 200
    open: bool = False  # needs no key
    answer: str = ""  # the component that describes its JSON; "": any object


HEADERS: dict[str, tuple[str, Json]] = {
    "X-Request-Id": (
        "The id of this request, returned in the answer; replaced if malformed; may be used again",
        {"type": "string"},
    ),
    CLASS_HEADER: ("Overrides service_class and priority of the body", {"enum": [*SERVICE_CLASSES]}),
    SESSION_HEADER: (
        "The conversation or agent of this request; overrides session_id of the body",
        {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"},
    ),
    RESUME_HEADER: (
        "Output tokens already received from a lost node; needs the original X-Request-Id and a single choice",
        {"type": "string", "pattern": "^[0-9]{1,9}$"},
    ),
}
"""Optional headers of requests whose answer may be a stream: name -> (purpose, schema)."""

# fmt: off
OPERATIONS = {
    "POST /v1/completions": Operation("Continue a prompt", CompletionBody, (JSON, EVENTS), answer="Completion"),
    "POST /v1/chat/completions": Operation("Answer a conversation", ChatBody, (JSON, EVENTS), answer="ChatCompletion"),
    "POST /v1/responses": Operation("Answer a conversation", ResponsesBody, (JSON, EVENTS), answer="Response"),
    "POST /v1/messages": Operation("Answer a conversation", MessagesBody, (JSON, EVENTS), answer="AnthropicMessage"),
    "POST /v1/messages/count_tokens": Operation("Tokens of a conversation", CountBody, answer="TokenCount"),
    "POST /v1/files": Operation("Keep a file of requests for a batch: multipart/form-data", answer="File"),
    "GET /v1/files": Operation("Files that this node keeps", answer="Files"),
    "GET /v1/files/{file_id}": Operation("A file", answer="File"),
    "DELETE /v1/files/{file_id}": Operation("Delete a file"),
    "GET /v1/files/{file_id}/content": Operation("The bytes of a file", types=("application/octet-stream",)),
    "POST /v1/batches": Operation("Answer the requests of a file in idle capacity", BatchBody, answer="Batch"),
    "GET /v1/batches": Operation("Batches of this node", answer="Batches"),
    "GET /v1/batches/{batch_id}": Operation("The progress of a batch", answer="Batch"),
    "POST /v1/batches/{batch_id}/cancel": Operation("End a batch; the answers so far stay", answer="Batch"),
    "POST /v1/embeddings": Operation("Refused: this server generates text", types=()),
    "GET /v1/models": Operation("The served model", answer="Models"),
    "GET /v1/models/{model}": Operation("The served model by its name", answer="Model"),
    "POST /tokenize": Operation("Token ids of a text or a conversation", TokenizeBody, answer="Tokens"),
    "POST /detokenize": Operation("Text of token ids", DetokenizeBody, answer="Detokenized"),
    "GET /tokenizer_info": Operation("Special tokens and chat template"),
    "GET /health": Operation("Can this node serve?", open=True, answer="Health"),
    "GET /ping": Operation("As /health, for SageMaker", open=True, answer="Health"),
    "POST /ping": Operation("As /health, for SageMaker", open=True, answer="Health"),
    "GET /load": Operation("Requests that this node works on for its clients", answer="Load"),
    "GET /version": Operation("Version of the server", answer="Version"),
    "GET /server_info": Operation("The flags of this node"),
    "GET /metrics": Operation("Prometheus metrics", types=(TEXT,), open=True),
    "GET /openapi.json": Operation("This document"),
    "GET /docs": Operation("This document as a page", types=("text/html",)),
    "GET /debug/state": Operation("Everything this node knows about itself"),
    "GET /debug/requests/{request_id}": Operation("Timeline of a request that this node accepted"),
    "GET /cluster": Operation("Members, roles and addresses"),
    "GET /live": Operation("The current state of the cluster, as each node reports it"),
    "GET /live/history": Operation("The last 15 minutes of the cluster; ?after=N: intervals with a number above N"),
    "GET /live/requests/{request_id}": Operation("Timeline of a request that any node accepted"),
    "POST /drain": Operation("Leave the cluster without dropping a request", DrainBody, answer="Drain"),
    "GET /drain": Operation("Progress of leaving", answer="Drain"),
    "POST /reset_prefix_cache": Operation("All nodes forget cached KV that no request uses"),
    "POST /v1/update_weights": Operation("Serve other weights, from tensors in the pool", UpdateWeightsBody),
    "GET /v1/update_weights": Operation("Which weights the cluster serves, as this node knows", answer="Weights"),
    "GET /": Operation("The live page", types=("text/html",), open=True),
} | {
    f"GET /{name}": Operation("A file of the live page", types=(TYPES[name[name.rindex("."):]],), open=True)
    for name in ASSETS
}
# fmt: on


def document(
    routes: Iterable[web.AbstractRoute], version: str, with_key: bool, values: Mapping[str, Json], open_bodies: bool
) -> Json:
    """The document of these routes. `with_key`: clients must send an API key. `values`: net.http.openai.rules.values.
    `open_bodies`: unknown fields are ignored. Raises LookupError."""
    paths: dict[str, Json] = {}
    for route in routes:
        if route.method == "HEAD":  # every GET has one
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
    models = {name: _completed(name, schema, name in known) for name, schema in schemas["$defs"].items()}
    if open_bodies:
        for kind in _subclasses(Known):
            models.get(kind.__name__, {}).pop("additionalProperties", None)
        for name, kind_of_tool in IGNORED_TOOLS.items():
            foreign = {"type": "object", "required": ["type"], "properties": {"type": _other_than(kind_of_tool)}}
            models[name] = {"anyOf": [models[name], foreign]}
    components: Json = {"schemas": {**values, **models, **ANSWERS}}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Mooncake", "version": version, "description": "OpenAI-compatible, with vLLM's extensions"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(path: str, operation: Operation, with_key: bool) -> Json:
    error = {"description": "An error in OpenAI's format", "content": {JSON: {"schema": _reference("Error")}}}
    whole = _reference(operation.answer) if operation.answer else {"type": "object"}
    content = {kind: {"schema": whole if kind == JSON else {}} for kind in operation.types}
    answers: Json = {"200": {"description": operation.summary, "content": content}} if content else {"400": error}
    described: Json = {"summary": operation.summary, "responses": answers | {"default": error}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if EVENTS in operation.types:
        parameters += [
            {"name": name, "in": "header", "description": purpose, "schema": schema}
            for name, (purpose, schema) in HEADERS.items()
            if name != RESUME_HEADER or path.endswith("/completions")
        ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = _reference(operation.body.__name__)
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if with_key and not operation.open:
        described["security"] = [{"key": []}]
    return described


def _completed(name: str, schema: Json, is_body: bool) -> Json:
    """Adds the rules that pydantic does not know. A body also gets everything that `served_fields` accepts: null for
    every optional field, ignored fields, and fields that accept only neutral values."""
    properties = schema["properties"] | FIELDS.get(name, {})
    if is_body:
        required = set(schema.get("required", ()))
        ignored: dict[str, Json] = {field: {} for field in sorted(IGNORED)}
        neutral: dict[str, Json] = {field: {"enum": [*values, None]} for field, values in NEUTRAL.items()}
        served = {field: kind if field in required else _or_null(kind) for field, kind in properties.items()}
        properties = ignored | neutral | served
    rules = {"allOf": RULES[name]} if name in RULES else {}
    return {**schema, "properties": properties, **rules}


def _other_than(text: str) -> Json:
    return {"type": "string", "not": {"const": text}}


def _or_null(kind: Json) -> Json:
    return kind if NULL in kind.get("anyOf", ()) else {"anyOf": [kind, NULL]}


def _reference(model: str) -> Json:
    return {"$ref": REFERENCE.format(model=model)}


def _subclasses(kind: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
