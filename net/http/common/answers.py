"""JSON Schemas of the answers in the OpenAPI document. net/http/openai/render.py and net/http/info.py build these
bodies. Later versions may add fields, but do not remove the ones listed here."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
TEXT_OR_NULL: Json = {"type": ["string", "null"]}
COUNT: Json = {"type": "integer", "minimum": 0}
NUMBER: Json = {"type": "number"}


def _object(**fields: Json) -> Json:
    """An object that contains all named fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _optional(kind: Json, **fields: Json) -> Json:
    return {**kind, "properties": kind["properties"] | fields}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(kind: Json) -> Json:
    return {"anyOf": [kind, {"type": "null"}]}


IDS = _list(COUNT)
LOGPROB = _object(token=TEXT, logprob=NUMBER, bytes=_list({"type": "integer", "minimum": 0, "maximum": 255}))
CHAT_LOGPROBS = _object(content=_list(_optional(LOGPROB, top_logprobs=_list(LOGPROB))), refusal={"type": "null"})
COMPLETION_LOGPROBS = _object(
    tokens=_list(TEXT),
    token_logprobs=_list({"type": ["number", "null"]}),
    top_logprobs=_list(_or_null({"type": "object", "additionalProperties": NUMBER})),
    text_offset=IDS,
)
RANKED = _object(logprob=NUMBER, rank=COUNT, decoded_token=TEXT)
PROMPT_LOGPROBS = _list(_or_null({"type": "object", "additionalProperties": RANKED}))
USAGE = _optional(
    _object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=_object(cached_tokens=COUNT),
    ),
    dropped_experts=COUNT,
)
CALL = _object(id=TEXT, type={"const": "function"}, function=_object(name=TEXT, arguments=TEXT))
MESSAGE = _optional(
    _object(role={"const": "assistant"}, content=TEXT_OR_NULL, refusal={"type": "null"}), tool_calls=_list(CALL)
)


def _choice(finish_reasons: list[str], **fields: Json) -> Json:
    ended = {"finish_reason": {"enum": finish_reasons}, "stop_reason": {"type": ["integer", "string", "null"]}}
    return _optional(_object(index=COUNT, **fields, **ended), token_ids=IDS, prompt_token_ids=IDS)


def _generated(kind: str, choice: Json) -> Json:
    head = {"id": TEXT, "created": COUNT, "model": TEXT, "object": {"const": kind}}
    return _object(**head, choices=_list(choice), usage=USAGE)


REASONS = ["stop", "length", "abort"]
COMPLETION = _generated(
    "text_completion",
    _optional(_choice(REASONS, text=TEXT, logprobs=_or_null(COMPLETION_LOGPROBS)), prompt_logprobs=PROMPT_LOGPROBS),
)
CHAT = _optional(
    _generated(
        "chat.completion",
        _choice([*REASONS, "tool_calls"], message=MESSAGE, logprobs=_or_null(CHAT_LOGPROBS)),
    ),
    prompt_logprobs=PROMPT_LOGPROBS,
)
RESPONSE = _object(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["completed", "incomplete"]},
    model=TEXT,
    output=_list(_object(type={"enum": ["message", "function_call"]}, id=TEXT, status=TEXT)),
    usage=_object(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
ANTHROPIC_MESSAGE = _object(
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content=_list(_object(type={"enum": ["text", "tool_use"]})),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=TEXT_OR_NULL,
    usage=_object(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT),
)
MODEL = _object(
    id=TEXT,
    object={"const": "model"},
    created=COUNT,
    owned_by=TEXT,
    root=TEXT,
    parent={"type": "null"},
    max_model_len=COUNT,
    weights_version=TEXT_OR_NULL,
)

ANSWERS: dict[str, Json] = {
    "Completion": COMPLETION,
    "ChatCompletion": CHAT,
    "Response": RESPONSE,
    "AnthropicMessage": ANTHROPIC_MESSAGE,
    "TokenCount": _object(input_tokens=COUNT),
    "Model": MODEL,
    "Models": _object(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
    "Tokens": _object(count=COUNT, max_model_len=COUNT, tokens=IDS, token_strs=_or_null(_list(TEXT))),
    "Detokenized": _object(prompt=TEXT),
    "Load": _object(server_load=COUNT),
    "Health": _optional(_object(status={"const": "ok"}), masked_ranks={"type": "object", "additionalProperties": TEXT}),
    "Version": _object(version=TEXT),
    "Drain": _object(
        node_id=TEXT, draining={"type": "boolean"}, accepted=COUNT, computing=COUNT, left_s={"type": ["number", "null"]}
    ),
    "Weights": _object(
        generation=COUNT,
        key=TEXT,
        prefix=TEXT,
        tenant=TEXT,
        version=TEXT,
        root=TEXT,
        updating={"type": "boolean"},
        behind=TEXT_OR_NULL,
        held=_list(TEXT),
    ),
    "Error": _object(
        type={"const": "error"}, error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)
    ),
}
"""Components of the document."""
