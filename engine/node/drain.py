"""`python mooncake.py drain --url http://NODE`: waits until the node has left without dropping a request."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from engine.observe.node_client import Json, NoAnswer, NodeClient, add_flags

POLL_S = 0.2
LEAVE_S = 30.0
"""After its deadline: handing pooled blocks over (--leave-ms) and closing."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when the node has left with nothing unfinished, 1 when time was up first, 2 when it refused."""
    args = flags().parse_args(argv)
    body = {"timeout_s": args.timeout_s, "grace_s": args.grace_s, "force": args.force}
    try:
        node = NodeClient.from_flags(args)
        progress = node.post("/drain", body)
    except NoAnswer as error:
        remedy = "; here by --force" if error.status == 409 else ""
        print(f"mooncake drain: {error}{remedy}", file=sys.stderr)
        return 2
    return wait(node, progress, args.timeout_s + LEAVE_S)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="mooncake drain", description="A node leaves without dropping a request.")
    add_flags(parser, "the node that leaves")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for requests in progress (default: 300)")
    parser.add_argument("--grace-s", type=float, default=1.0, help="still accept requests for so long (default: 1)")
    parser.add_argument("--force", action="store_true", help="also the last node of its role")
    return parser


def wait(node: NodeClient, progress: Json, timeout_s: float) -> int:
    """Until the node answers no more; says what is left whenever that changes."""
    node_id, deadline, said = progress["node_id"], time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        line = (
            f"{node_id}: {progress['accepted']} clients of its own wait, {progress['computing']} requests computed here"
        )
        if line != said:
            print(line, flush=True)
            said = line
        time.sleep(POLL_S)
        try:
            progress = node.get("/drain")
        except NoAnswer as error:
            if error.status is not None:  # it is there, and too busy to say more
                continue
            unfinished = progress["left_s"] is not None and progress["left_s"] <= POLL_S and progress["accepted"]
            print(f"{node_id} has left" + (f", {progress['accepted']} requests unfinished" if unfinished else ""))
            return 1 if unfinished else 0
    print(f"mooncake drain: {node_id} still answers after {timeout_s:g} s", file=sys.stderr)
    return 1
