"""The client of the commands `top`, `drain` and `explain`: URL, key, errors in one line. Blocking."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from net.http.common.keys import ApiKeyFileError, key_to_send

Json = dict[str, Any]
T = TypeVar("T")
TIMEOUT_S = 10.0


class NoAnswer(Exception):
    """The node did not answer, or its answer is invalid. The message is one line and names the remedy; `status`: the
    HTTP status, None without one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NodeClient:
    """JSON from and to the node at `url`, with or without 'http://'."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> Self:
        """Raises NoAnswer for a key file that cannot be used."""
        try:
            file = None if args.api_key_file is None else args.api_key_file.expanduser()
            return cls(args.url, key_to_send(args.api_key, file))
        except ApiKeyFileError as error:
            raise NoAnswer(str(error)) from None

    def get(self, path: str) -> Json:
        """Raises NoAnswer."""
        return self._send(path, json.loads)

    def text(self, path: str) -> str:
        """Raises NoAnswer."""
        return self._send(path, bytes.decode)

    def post(self, path: str, body: Json) -> Json:
        """Raises NoAnswer."""
        return self._send(path, json.loads, json.dumps(body).encode())

    def _send(self, path: str, decode: Callable[[bytes], T], body: bytes | None = None) -> T:
        # Without the proxy of the user's shell, which would also get requests to 127.0.0.1.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url + path, body, self._headers | kind)
            with opener.open(request, timeout=self._timeout_s) as answer:
                return decode(answer.read())
        except urllib.error.HTTPError as error:
            raise NoAnswer(f"{self.url} answers {error.code}: {_reason(error)}", error.code) from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # the last: it speaks another protocol
            why = getattr(error, "reason", None) or str(error).strip() or type(error).__name__
            raise NoAnswer(f"{self.url} does not answer ({why}); give --url of a running node") from None


def add_flags(parser: argparse.ArgumentParser, which: str) -> None:
    """--url (of `which` node), --api-key and --api-key-file."""
    parser.add_argument("--url", metavar="HOST:PORT", default="127.0.0.1:8000", help=f"{which} (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="key of the cluster, if it has one; visible in `ps`")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file whose first key is sent instead")


def _reason(error: urllib.error.HTTPError) -> str:
    """The node's message, with the remedy for a missing key."""
    with error:
        text = error.read().decode(errors="replace")
    try:
        said = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = f"{text[:200].strip()!r}, which is not an answer of a Mooncake node; give --url of one"
    return f"{said} (--api-key or --api-key-file here)" if error.code == 401 else said
