"""`python mooncake.py drain --url http://NODE`: waits until the node has left without dropping a request."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from engine.observe.node_client import Json, NoAnswer, NodeClient, add_flags

POLL_S = 0.2
LEAVE_S = 30.0
"""Allowed after the node's deadline, for handing over pooled blocks (--leave-ms) and closing."""


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if the node has left without unfinished requests, 1 if it ran out of time, 2 if it refused."""
    args = flags().parse_args(argv)
    body = {"timeout_s": args.timeout_s, "grace_s": args.grace_s, "force": args.force}
    try:
        node = NodeClient.from_flags(args)
        progress = node.post("/drain", body)
    except NoAnswer as error:
        remedy = " (--force)" if error.status == 409 else ""
        print(f"mooncake drain: {error}{remedy}", file=sys.stderr)
        return 2
    return wait(node, progress, args.timeout_s + LEAVE_S)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="mooncake drain", description="A node leaves without dropping a request.")
    add_flags(parser, "the node that leaves")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="time for running requests (default: 300)")
    parser.add_argument("--grace-s", type=float, default=1.0, help="time in which it accepts requests (default: 1)")
    parser.add_argument("--force", action="store_true", help="drain even the last node of a role")
    return parser


def wait(node: NodeClient, progress: Json, timeout_s: float) -> int:
    """Wait until the node no longer answers; print the remaining requests whenever their number changes."""
    node_id, deadline, said = progress["node_id"], time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        line = f"{node_id}: {progress['accepted']} accepted requests unfinished, {progress['computing']} being computed"
        if line != said:
            print(line, flush=True)
            said = line
        time.sleep(POLL_S)
        try:
            progress = node.get("/drain")
        except NoAnswer as error:
            if error.status is not None:  # the node still answers, but is too busy
                continue
            unfinished = progress["left_s"] is not None and progress["left_s"] <= POLL_S and progress["accepted"]
            print(f"{node_id} has left" + (f", {progress['accepted']} requests unfinished" if unfinished else ""))
            return 1 if unfinished else 0
    print(f"mooncake drain: {node_id} still answers after {timeout_s:g} s", file=sys.stderr)
    return 1
