"""Which HTTP request the code that logs works for; tasks inherit it."""

from __future__ import annotations

from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
