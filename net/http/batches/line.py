"""One line of an input file, and the lines of output and error files, in OpenAI's form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from net.http.common.bounds import MAX_DEPTH, MAX_VALUES, containers_in, deeper_than, values_in

MAX_LINES = 50_000
MAX_FILE_BYTES = 200 << 20
MAX_LINE_BYTES = 8 << 20
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
SHOWN_ERRORS = 100
"""Errors of a file that its batch lists."""


class LineError(ValueError):
    """A line that no batch can answer."""

    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    def entry(self, line: int) -> dict[str, Any]:
        """The error in `errors.data` of a batch; `line` counts from 1."""
        return {"code": self.code, "line": line, "message": str(self), "param": self.param}


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    number: int  # from 0
    custom_id: str
    body: Mapping[str, Any]


def opened(raw: bytes) -> dict[str, Any]:
    """The object of a line, which has a valid custom_id. Raises LineError."""
    if len(raw) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"a line may have {MAX_LINE_BYTES} bytes, this one has more", None)
    if (values := values_in(raw)) > MAX_VALUES:
        message = f"a line may have about {MAX_VALUES} values, as the body of a request; this one has {values}"
        raise LineError("line_too_long", message, None)
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise LineError("invalid_json_line", f"this line is not valid JSON: {error}", None) from None
    if not isinstance(parsed, dict):
        raise LineError("invalid_json_line", "this line is not a JSON object", None)
    custom_id = parsed.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise LineError("missing_required_parameter", "custom_id must be a string of 1 to 512 characters", "custom_id")
    return parsed


def parse(raw: bytes, number: int, endpoint: str, model: str) -> Line:
    """Raises LineError. `model`: the name that the body must have."""
    parsed = opened(raw)
    body = parsed.get("body")
    if parsed.get("method") != "POST":
        raise LineError("invalid_method", "method must be POST", "method")
    if parsed.get("url") != endpoint:
        raise LineError("invalid_url", f"url must be the batch's endpoint {endpoint}", "url")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "body must be a JSON object", "body")
    if containers_in(raw) > MAX_DEPTH and deeper_than(MAX_DEPTH, body):
        raise LineError("invalid_value", f"body is nested more than {MAX_DEPTH} levels deep", "body")
    if body.get("stream"):
        raise LineError("invalid_value", "a batch cannot stream its answers", "body.stream")
    if body.get("model") != model:
        named = str(body.get("model"))[:80]
        raise LineError("model_not_found", f"this cluster serves {model!r}, not {named!r}", "body.model")
    return Line(number, parsed["custom_id"], body)


def answered(
    batch_id: str, number: int, custom_id: str, request_id: str, status: int, body: Mapping[str, Any]
) -> dict[str, Any]:
    """A line with an answer of the API: of the output file with status 200, else of the error file."""
    response = {"status_code": status, "request_id": request_id, "body": dict(body)}
    return {"id": f"batch_req_{batch_id}-{number}", "custom_id": custom_id, "response": response, "error": None}


def unanswered(batch_id: str, number: int, custom_id: str, code: str, message: str) -> dict[str, Any]:
    """A line of the error file for a request that did not run."""
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{batch_id}-{number}", "custom_id": custom_id, "response": None, "error": error}
