"""Rules of bodies in the OpenAPI document beyond the types of single fields. They are values that depend on this
server, and constraints between fields. The validators of net/http/openai/schema.py and net/http/openai/plan.py check
the same rules.

JSON Schema cannot express all of them. UNSAID lists the others: the server refuses such bodies although the document
allows them.
"""

from __future__ import annotations

from typing import Any

from net.http.common.frontend import Frontend
from net.http.openai.schema import (
    MAX_ALLOWED_IDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_CHARS,
    RESERVED,
)

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"

UNSAID = (
    "maximum context length",  # how many tokens a text has
    "min_tokens must be between 0 and max_tokens",
    "choices",  # prompts times n
    "best_of: ",  # compared with n
    "--max-answer-logprobs",  # tokens x choices x (1 + alternatives)
    "is not in the vocabulary",  # of logit_bias: its keys are strings
    "tools contains no such tool",
    "are not JSON",  # arguments of an earlier tool call
    "levels deep",  # nested lists and objects
    "cannot compile the",  # a grammar
    "is not valid jinja2",  # a chat template
    "shows no text of the last message",  # the chat template
    "which mark control tokens",  # a message
    "a schema may have",
    "a grammar may have",
    "input: item",  # of an item's type
    "messages: turn",  # of a block's type
    "every block must be",
    "the last turn must be of the user",
    "format.schema is missing",
    "keeps no answers",
    "tool_choice: must be",
    "refused the messages",  # by the chat template
    " is empty",  # a text or a conversation without any token
    "header X-",  # not part of the body
)
"""Parts of messages that refuse a body although the document allows it."""


def _to(model: str) -> Json:
    return {"$ref": REFERENCE.format(model=model)}


def _given(**fields: Json) -> Json:
    """These fields are present, with such values."""
    return {"required": list(fields), "properties": fields}


def _if(condition: Json, then: Json) -> Json:
    return {"if": condition, "then": then}


def _at_most_one(*conditions: Json) -> Json:
    return {"oneOf": [*conditions, {"not": {"anyOf": list(conditions)}}]}


def _list(items: Json, **limits: int) -> Json:
    return {"type": "array", "items": items, **limits}


TEXT: Json = {"type": "string", "minLength": 1}
TRUE: Json = {"const": True}
PROMPT_IDS = _to("PromptIds")
ONE_PROMPT = {"minItems": 1, "maxItems": MAX_CHOICES}
STOP_TEXT: Json = TEXT | {"maxLength": MAX_STOP_CHARS}
STOP = {"anyOf": [STOP_TEXT, _list(STOP_TEXT, maxItems=MAX_STOP_STRINGS)]}
BIAS: Json = {
    "type": "object",
    "maxProperties": MAX_BIASES,
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
TEMPLATE_ARGUMENTS: Json = {
    "type": "object",
    "propertyNames": {"not": {"enum": sorted(RESERVED)}},
}
TEMPLATE: Json = TEXT | {"maxLength": MAX_TEMPLATE_CHARS}
PART: Json = {"anyOf": [_given(type={"const": kind}, **{kind: {"type": "string"}}) for kind in ("text", "refusal")]}
CALLED: Json = {"type": "object"} | _given(name={"type": "string"})
CALL: Json = {"type": "object"} | _given(function=CALLED)
NAMED: Json = {"type": "object"} | _given(function={"type": "object"} | _given(name={"type": "string"}))
WITH_TOOLS = _given(tools={"type": "array", "minItems": 1})

ASKS: dict[str, Json] = {
    "guided_json": {"type": ["object", "string"]},
    "guided_regex": {"type": "string"},
    "guided_choice": {"type": "array"},
    "guided_grammar": {"type": "string"},
    "structured_outputs": {"type": "object", "not": {"additionalProperties": {"type": "null"}}},
    "response_format": {"type": "object", "not": _given(type={"const": "text"})},
}
"""Fields that request structured output, with the values that do so."""

STRUCTURED: Json = {"anyOf": [_given(**{field: asking}) for field, asking in ASKS.items()]}
CONSTRAINED: Json = {"anyOf": [_given(**{field: ASKS[field]}) for field in ASKS if field != "response_format"]}
"""Also constrains an answer that is a call."""
FORCED: Json = {"anyOf": [_given(tool_choice={"const": "required"}), _given(tool_choice={"type": "object"})]}

GENERATION: dict[str, Json] = {
    "model": _to("ModelName"),
    "max_tokens": _to("OutputTokens"),
    "min_tokens": _to("OutputTokens"),
    "stop": STOP,
    "stop_token_ids": _list(_to("TokenId"), maxItems=MAX_STOP_IDS),
    "logit_bias": BIAS,
    "allowed_token_ids": _list(_to("TokenId"), minItems=1, maxItems=MAX_ALLOWED_IDS),
}

FIELDS: dict[str, dict[str, Json]] = {
    "CompletionBody": GENERATION
    | {"prompt": {"anyOf": [TEXT, PROMPT_IDS, _list(TEXT, **ONE_PROMPT), _list(PROMPT_IDS, **ONE_PROMPT)]}},
    "ChatBody": GENERATION
    | {
        "max_tokens": _to("AnswerTokens"),
        "max_completion_tokens": _to("AnswerTokens"),
        "chat_template": _to("ChatTemplate"),
        "chat_template_kwargs": TEMPLATE_ARGUMENTS,
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, NAMED]},
    },
    "TokenizeBody": {
        "model": _to("ModelName"),
        "chat_template": _to("ChatTemplate"),
        "chat_template_kwargs": TEMPLATE_ARGUMENTS,
    },
    "DetokenizeBody": {"model": _to("ModelName"), "tokens": _list(_to("TokenId"))},
    "Message": {
        "content": {"anyOf": [{"type": ["string", "null"]}, _list(PART)]},
        "tool_calls": {"anyOf": [{"type": "null"}, _list(CALL)]},
    },
    "StructuredOutputs": {"json_object": {"enum": [True, None]}},
}
"""Model -> field -> its schema, for fields whose schema is stricter than pydantic's."""

WITHOUT: dict[str, Json] = {
    "min_tokens": {"enum": [0, None]},
    "ignore_eos": {"enum": [False, None]},
    "allowed_token_ids": {"type": "null"},
    "bad_words": {"enum": [[], None]},
}
"""Fields with structured output: only the grammar decides which tokens may follow."""

_GENERATION_RULES = [
    {"not": _given(stream=TRUE, prompt_logprobs={"type": "integer"})},
    _at_most_one(*STRUCTURED["anyOf"]),
    _if(STRUCTURED, {"properties": WITHOUT}),
]
_TEMPLATED_RULES = [_if(_given(continue_final_message=TRUE), _given(add_generation_prompt={"const": False}))]
RULES: dict[str, list[Json]] = {
    "CompletionBody": [*_GENERATION_RULES, _if(_given(max_tokens={"const": 0}), _given(echo=TRUE))],
    "ChatBody": [
        *_GENERATION_RULES,
        _if(_given(top_logprobs={"type": "integer", "minimum": 1}), _given(logprobs=TRUE)),
        _if(FORCED, {"allOf": [WITH_TOOLS, {"properties": WITHOUT}], "not": CONSTRAINED}),
        *_TEMPLATED_RULES,
    ],
    "TokenizeBody": [{"oneOf": [_given(prompt={"type": "string"}), _given(messages={"type": "array"})]}],
    "ResponseFormat": [
        _if(_given(type={"const": "json_schema"}), _given(json_schema={"type": "object"})),
        _if(_given(type={"const": "regex"}), _given(pattern={"type": "string"})),
        _if(_given(json_schema={"type": "object"}), _given(type={"const": "json_schema"})),
        _if(_given(pattern={"type": "string"}), _given(type={"const": "regex"})),
    ],
    "StructuredOutputs": [
        _at_most_one(
            *(
                _given(**{one: {"not": {"type": "null"}}})
                for one in ("json", "regex", "choice", "grammar", "json_object")
            )
        )
    ],
}
"""Model -> constraints between its fields. A null is an absent field."""


def values(frontend: Frontend) -> dict[str, Json]:
    """Schemas that depend on the served model."""
    most = max(1, frontend.max_model_len - 1)
    token = {"type": "integer", "minimum": 0, "maximum": max(0, frontend.vocab_size - 1)}
    return {
        "ModelName": {"enum": ["", frontend.model_name]},
        "TokenId": token,
        "PromptIds": _list(_to("TokenId"), minItems=1),
        "OutputTokens": {"type": "integer", "minimum": 0, "maximum": most},
        "AnswerTokens": {"type": "integer", "minimum": 1, "maximum": most},
        "ChatTemplate": TEMPLATE if frontend.trusts_chat_templates else {"type": "null"},
    }
