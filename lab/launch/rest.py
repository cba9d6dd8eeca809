"""JSON over HTTP to a node, for the launcher and the tests. Blocking; one small function per verb."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


class RestError(Exception):
    """The node did not answer with 2xx; the message is the node's."""


def get(url: str, key: str | None = None, timeout_s: float = 5.0) -> Any:
    """Decoded body of GET `url`. Raises RestError."""
    return _send(urllib.request.Request(url), key, timeout_s)


def post(url: str, body: Any, key: str | None = None, timeout_s: float = 600.0) -> Any:
    """Decoded body of POST `url`. Raises RestError."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return _send(request, key, timeout_s)


def _send(request: urllib.request.Request, key: str | None, timeout_s: float) -> Any:
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    # No proxy: our nodes are never behind one, and the user's http_proxy must not apply to 127.0.0.1.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RestError(f"{request.full_url}: {error.code} {error.read().decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise RestError(f"{request.full_url}: {error}") from None
