"""`mooncake.py expert-rank --join HOST:PORT`: this process is a rank of a node on another host, or of several nodes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.model_source import describe
from engine.model.model_error import ModelError
from engine.observe import logs
from net.channel.cluster_key import ClusterKey, KeyFileError
from net.errors import PeerRefused
from net.rounds.door import parsed, spelled
from net.rounds.native import MOST_RANKS
from net.rounds.rdma.ways import Ways


def main(argv: Sequence[str]) -> int:
    """Runs until a signal ends it. Exit code 0: it was an added rank and has left; 2: all nodes refuse this process, or
    it cannot load."""
    args = flags().parse_args(argv)
    try:
        nodes = _nodes(args.join.split(","), args.rank is not None)
    except ValueError as error:
        print(f"mooncake expert-rank: --join {args.join}: {error}", file=sys.stderr)
        return 2
    ways = ways_of(args)
    if unusable := ways.offer().unusable:
        print(f"mooncake expert-rank: {unusable}", file=sys.stderr)
        return 2
    _on_signals(signal.SIG_DFL)  # in the middle of a product too
    logs.configure(args.log_level, "text")
    try:
        key = None if args.cluster_key_file is None else ClusterKey(Path(args.cluster_key_file))
        source = None if args.model is None else describe(args.model, args.load_format, args.seed)
        # Here, because torch costs a second that the other commands do not need.
        from engine.experts.remote_worker import RemoteWorker, limit_threads

        threads = args.num_threads or len(os.sched_getaffinity(0))
        limit_threads(threads)
        if args.rank is not None:
            from engine.experts.shared_rank import SharedRank

            SharedRank(args.rank, nodes, source, key, threads, ways).run()

        def leave(number: int, frame: object) -> None:
            _on_signals(signal.SIG_DFL)  # a second one ends at once
            worker.leave()

        def may_leave(now: bool) -> None:
            _on_signals(leave if now else signal.SIG_DFL)

        worker = RemoteWorker(parsed(nodes[0]), source, key, may_leave, ways, args.name)
        worker.run()
        return 0
    except (PeerRefused, ModelError, KeyFileError) as error:
        print(f"mooncake expert-rank: {error}", file=sys.stderr)
    return 2


def ways_of(args: argparse.Namespace) -> Ways:
    """How messages may go between this process and its nodes."""
    names = [] if args.rdma_devices == "auto" else [name.strip() for name in args.rdma_devices.split(",")]
    sealed_only = args.cluster_key_file is not None and not args.rdma_plaintext
    return Ways(args.transport, names, args.rdma_gid_index, sealed_only=sealed_only)


def _nodes(nodes: Sequence[str], several: bool) -> list[str]:
    """By the names that were given: each connection looks up again where they are. Raises ValueError."""
    if len(nodes) > 1 and not several:
        raise ValueError("a process is a rank of several nodes only with --rank")
    return [spelled(parsed(node.strip())) for node in nodes]


def _on_signals(action: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mooncake expert-rank",
        description="This process has a share of the experts of a node on another host, which was started with "
        "--expert-remote-ranks or --max-expert-parallel-size, or of several nodes. It joins again whenever a "
        "connection ends.",
    )
    parser.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT[,HOST:PORT...]",
        help="where the node listens for ranks (it logs the address). With --rank, one or more of the nodes: they name "
        "the others",
    )
    parser.add_argument(
        "--rank",
        type=_rank,
        help="number of this rank, from 0, if nodes share it: those have --expert-remote-ranks equal to "
        "--expert-parallel-size. Without it, the node gives this process a number",
    )
    parser.add_argument(
        "--name",
        default="",
        help="for the node that started this process by --expert-scale-command: it ends processes under the names that "
        "it gave them, and no others",
    )
    parser.add_argument("--model", help="the node's model on this host; without it, the weights come from the node")
    parser.add_argument("--load-format", default="auto", help="of --model, as the node's (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of --load-format dummy, as the node's (default: 0)")
    parser.add_argument("--cluster-key-file", help="the cluster's keys, if the node has --cluster-key-file")
    parser.add_argument(
        "--transport",
        default="auto",
        choices=("auto", "rdma", "tcp"),
        help="how messages go to nodes on other hosts: auto = rdma where both sides have it, else tcp (default: auto)",
    )
    parser.add_argument(
        "--rdma-devices",
        default="auto",
        metavar="NAMES",
        help="RDMA devices in the order of the rails, joined by commas, as the node's (default: all)",
    )
    parser.add_argument("--rdma-gid-index", type=int, help="GID index of the RDMA devices, as the node's")
    parser.add_argument(
        "--rdma-plaintext",
        action="store_true",
        help="allow messages over RDMA, which does not encrypt them, although --cluster-key-file is given",
    )
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (default: all cores)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _rank(given: str) -> int:
    if not given.isdecimal() or len(given) > 2 or int(given) >= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{given} is no rank: they count from 0 to {MOST_RANKS - 1}")
    return int(given)
