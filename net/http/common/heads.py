"""Reads the id and the API key of a request from its headers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from net.http.common.errors import ApiError

SESSION_HEADER = "X-Session-Id"

_sane_id = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's X-Request-Id if it is printable and short, else a new one."""
    given = headers.get("X-Request-Id", "")
    return given if _sane_id.fullmatch(given) else secrets.token_hex(12)


def session_of(headers: Mapping[str, str]) -> str:
    """The client's X-Session-Id, which names a conversation or an agent; empty: none. Raises ApiError 400."""
    given = headers.get(SESSION_HEADER)
    if given is None:
        return ""
    if not _sane_id.fullmatch(given):
        message = f"header {SESSION_HEADER} has 1 to 128 letters, digits and . _ : -, and begins with one of the former"
        raise ApiError(400, message, param=SESSION_HEADER)
    return given


def given_key(headers: Mapping[str, str]) -> str:
    """The key as OpenAI's clients send it, or as Anthropic's do; empty: none."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("X-Api-Key", "").strip()
