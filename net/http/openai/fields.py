"""Fields of request bodies: the treatment of fields that are not served, and types that several bodies share.

Every field of a body is one of
- served: a field of a model (net/http/openai/schema.py);
- ignored: harmless (IGNORED), accepted so that stock clients work;
- neutral: known but not served (NEUTRAL), accepted only with values that have no effect;
- unknown: ignored, and named in a header of the answer, or refused with 400 (--unknown-fields).
A null means the same as an absent field, as in OpenAI's API.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

# fmt: off
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "reasoning_effort", "verbosity",
})
# fmt: on
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,),
    "include_obfuscation": (False,),
    "detokenize": (True,),
}


MAX_EXACT_INT = 2**53
"""Above it, one float represents several integers."""


def _whole(value: Any) -> Any:
    """Converts 16.0 to 16: JSON has one kind of number, and some clients write integers this way."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT_INT
    return int(value) if exact else value


def whole_ids(values: Any) -> Any:
    """Converts the elements of a list in the same way; returns other values unchanged. Fast for long integer lists."""
    return list(map(_whole, values)) if isinstance(values, list) and float in set(map(type, values)) else values


WHOLE = BeforeValidator(_whole)
TokenIds = Annotated[list[int], Field(fail_fast=True), BeforeValidator(whole_ids)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE]
AtLeast0 = Annotated[int, Field(ge=0, lt=2**63), WHOLE]
AtLeast1 = Annotated[int, Field(ge=1, lt=2**63), WHOLE]
UpTo20 = Annotated[int, Field(ge=0, le=20), WHOLE]


class Known(BaseModel):
    """Strict: a string does not pass as a number, nor a number as a bool. If the validation context is a list, unknown
    fields are ignored and their names added to it; without a context they are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, body: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in body if name not in known]
        info.context.extend(unknown)
        return {name: value for name, value in body.items() if name in known} if unknown else body


def _same(value: Any, other: Any) -> bool:
    """Equality in JSON, where true differs from 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def served_fields(body: dict[str, Any]) -> dict[str, Any]:
    """`body` without nulls, ignored and neutral fields. Raises ValueError for a known field that is not served."""
    served = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in NEUTRAL:
            if not any(_same(value, one) for one in NEUTRAL[name]):
                raise ValueError(f"{name} is not supported by this server; leave it out")
            continue
        served[name] = value
    return served
