"""--backend: where a worker answers, and where it tells its KV events. Pure.

http://HOST:PORT                                                    its HTTP API
http://HOST:PORT,events=tcp://HOST:PORT,replay=tcp://HOST:PORT      also its KV events, and the missed ones
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Address:
    """Of one worker."""

    url: str  # without a slash at the end
    events: str | None = None  # a ZeroMQ endpoint; None: nothing is known of its prefixes
    replay: str | None = None

    @property
    def name(self) -> str:
        """HOST:PORT, the worker's name in placements and reports."""
        return urlsplit(self.url).netloc


def addresses(text: str) -> list[Address]:
    """Of all workers: the values of --backend, joined by spaces. Raises ValueError with the reason."""
    found = [_address(one) for one in text.split()]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names {twice} twice")
    return found


def _address(text: str) -> Address:
    url, *more = text.split(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{url!r} is not http://HOST:PORT")
    named = dict(_named(more))
    if "replay" in named and "events" not in named:
        raise ValueError(f"{text!r} names replay= without events=")
    return Address(url.rstrip("/"), named.get("events"), named.get("replay"))


def _named(parts: list[str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        name, _, endpoint = part.partition("=")
        if name not in ("events", "replay") or "://" not in endpoint:
            raise ValueError(f"{part!r} is neither events=ENDPOINT nor replay=ENDPOINT, like events=tcp://HOST:5557")
        yield name, endpoint
