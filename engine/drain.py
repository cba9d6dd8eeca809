"""`python mooncake.py drain --url http://NODE`: the node leaves without dropping a request, and this waits for it."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

POLL_S = 0.2
LEAVE_S = 30.0
"""After its deadline: handing pooled blocks over (--leave-ms) and closing."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when the node has left with nothing unfinished, 1 when time was up first, 2 when it refused."""
    parser = argparse.ArgumentParser(prog="mooncake drain", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the node that leaves")
    parser.add_argument("--api-key", help="of the cluster; without one only the node's own host may ask")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for requests in progress (default: 300)")
    parser.add_argument("--grace-s", type=float, default=1.0, help="still accept requests for so long (default: 1)")
    parser.add_argument("--force", action="store_true", help="also the last node of its role")
    args = parser.parse_args(argv)
    url = args.url.rstrip("/") if "://" in args.url else f"http://{args.url.rstrip('/')}"
    body = {"timeout_s": args.timeout_s, "grace_s": args.grace_s, "force": args.force}
    try:
        progress = ask(f"{url}/drain", args.api_key, body)
    except urllib.error.HTTPError as error:
        print(f"mooncake drain: {url} answers {error.code}: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"mooncake drain: {url} does not answer ({error}); give --url of a running node", file=sys.stderr)
        return 2
    return wait(url, args.api_key, progress, args.timeout_s + LEAVE_S)


def wait(url: str, api_key: str | None, progress: dict[str, Any], timeout_s: float) -> int:
    """Until the node answers no more; says what is left whenever that changes."""
    node_id, deadline, said = progress["node_id"], time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        line = f"{node_id}: {progress['accepted']} of its clients wait, computes for {progress['computing']}"
        if line != said:
            print(line, flush=True)
            said = line
        time.sleep(POLL_S)
        try:
            progress = ask(f"{url}/drain", api_key, None)
        except (OSError, ValueError):
            unfinished = progress["left_s"] is not None and progress["left_s"] <= POLL_S and progress["accepted"]
            print(f"{node_id} has left" + (f", {progress['accepted']} requests unfinished" if unfinished else ""))
            return 1 if unfinished else 0
    print(f"mooncake drain: {node_id} still answers after {timeout_s:g} s", file=sys.stderr)
    return 1


def ask(url: str, api_key: str | None, body: dict[str, Any] | None) -> dict[str, Any]:
    """POST `body`, or GET. Raises OSError (HTTPError among them) and ValueError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=10) as answer:
        progress: dict[str, Any] = json.load(answer)
        return progress
