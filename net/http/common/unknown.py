"""--unknown-fields: ignores or refuses the fields of a body that this server does not know. A header of the answer
names the ignored fields."""

from __future__ import annotations

import re

from aiohttp import web

IGNORED_HEADER = "X-Ignored-Fields"
MAX_NAMED = 16
MAX_NAME_CHARS = 64

ignores_key: web.AppKey[bool] = web.AppKey("ignores", bool)

ignored_key: web.RequestKey[list[str]] = web.RequestKey("ignored", list)
"""Names of the fields of this request's body that are ignored, and the context in which its parts are validated. Absent
if unknown fields are refused."""


async def tell(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare signal: names the ignored fields, also for streams."""
    ignored = request.get(ignored_key)
    if ignored:
        names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME_CHARS]) for name in dict.fromkeys(ignored)]
        more = ["..."] if len(names) > MAX_NAMED else []
        response.headers[IGNORED_HEADER] = ", ".join(names[:MAX_NAMED] + more)
