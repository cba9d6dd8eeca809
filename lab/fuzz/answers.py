"""Judges every answer of an API under fuzzing. It looks for server errors, errors in another format, missing answers,
and refused bodies that the API's document allows. Pure.

The input is an HTTP archive (HAR 1.2), which most tools that send requests can write.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from lab.fuzz.promises import Promises

OVERLOAD = (429, 503)
ERROR_FIELDS = {"message", "type", "param", "code"}
SHOWN = 300  # characters of a body in a fault


class Judge:
    """`seen` counts (operation, status); `faults` lists forbidden answers with their requests."""

    def __init__(self, paths: Iterable[str], promises: Promises) -> None:
        """paths: of the OpenAPI document, like /v1/models/{model}; those without parameters are matched first.
        promises: the bodies that the document allows."""
        self._promises = promises
        patterns = {path: re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)) for path in sorted(paths, key=_parameters)}
        self._paths = [(path, re.compile(pattern)) for path, pattern in patterns.items()]
        self.seen: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []

    def take(self, entries: Iterable[dict[str, Any]]) -> None:
        """`entries` of an archive's log. One without entries is a fault: nothing was asked."""
        before = self.seen.total()
        for entry in entries:
            request, response = entry["request"], entry.get("response") or {"status": 0}
            status = int(response["status"])
            operation = f"{request['method']} {self._path(urlsplit(request['url']).path)}"
            self.seen[operation, status] += 1
            body = request.get("postData", {}).get("text", "")
            wrong = fault(request["method"], response)
            bare = request["method"] == "HEAD"  # its answer has no body, so it says nothing
            if (
                wrong is None
                and status >= 400
                and not bare
                and self._promises.broken(operation, body, status, said(response))
            ):
                wrong = f"{status} for a body that the document allows, {said(response)!r}"
            if wrong is not None:
                self.faults.append(f"{wrong}: {request['method']} {request['url'][:SHOWN]} {body[:SHOWN]}")

        if self.seen.total() == before:
            self.faults.append("the archive has no request, so nothing is known")

    def statuses(self, operation: str) -> dict[int, int]:
        return {status: count for (name, status), count in sorted(self.seen.items()) if name == operation}

    @property
    def operations(self) -> Sequence[str]:
        return sorted({name for name, _ in self.seen})

    def _path(self, path: str) -> str:
        return next((template for template, pattern in self._paths if pattern.fullmatch(path)), "(no such path)")


def fault(method: str, response: dict[str, Any]) -> str | None:
    """The fault of one answer, or None. 429 and 503 are correct if they say when to try again."""
    status = int(response["status"])
    if status == 0:
        return "no answer"
    if status < 400:
        return None
    names = {header["name"].lower() for header in response["headers"]}
    if status in OVERLOAD:
        if "retry-after" not in names:
            return f"{status} without Retry-After"
    elif status >= 500:
        return f"server error {status}"
    if method != "HEAD" and not is_error_body(response["content"].get("text", "")):
        return f"{status} without an error body"
    return None


def said(response: dict[str, Any]) -> str:
    """The message of an error body."""
    return str(json.loads(response["content"]["text"])["error"]["message"])


def is_error_body(text: str) -> bool:
    """Whether the text is {"error": {message, type, param, code}}."""
    try:
        body = json.loads(text)
    except ValueError:
        return False
    return isinstance(body, dict) and isinstance(body.get("error"), dict) and set(body["error"]) == ERROR_FIELDS


def _parameters(path: str) -> int:
    return path.count("{")
