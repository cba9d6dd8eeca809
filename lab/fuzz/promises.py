"""Whether an OpenAPI document allows a body, and whether a server may still refuse it. A server may do so for a
reason that JSON Schema cannot express. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator


class Promises:
    """The promises of one document."""

    def __init__(self, document: dict[str, Any], unsaid: Sequence[str] = ()) -> None:
        """unsaid: parts of the messages that may refuse an allowed body."""
        self._unsaid = unsaid
        self._checks = {
            f"{method.upper()} {path}": _validator(operation["requestBody"], document["components"])
            for path, item in document["paths"].items()
            for method, operation in item.items()
            if "requestBody" in operation
        }

    def allows(self, operation: str, text: str) -> bool:
        """operation: like 'POST /v1/completions'; False for an operation without a body."""
        check = self._checks.get(operation)
        try:
            return check is not None and bool(check.is_valid(json.loads(text, parse_constant=_no_constant)))
        except ValueError:
            return False

    def broken(self, operation: str, text: str, status: int, message: str) -> bool:
        """Whether the document allows this body, but the server refused it with a `message` about a rule that the
        document could express."""
        refused = status in (400, 422) and not any(part in message for part in self._unsaid)
        return refused and self.allows(operation, text)


def _validator(body: dict[str, Any], components: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**body["content"]["application/json"]["schema"], "components": components})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
