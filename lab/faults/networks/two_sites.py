"""Nodes of two sites, and what they know of the link between them: the cases of cut-sites and validate-sites.

one site       all nodes are in one place, so nothing crosses the link
no sites       a half of the nodes is behind the link, and none of them knows it
sites          --site: requests may move, no KV
sites and KV   --site-link-limit-bytes, a part of the link; what crosses twice becomes a copy
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from engine.observe.node_client import NodeClient
from lab.faults.networks.linked_sites import LinkedSites
from lab.flag_types import above_zero, positive, share, some_of_all
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import parse_nodes
from lab.loads.busy_site import BusySite

EAST, WEST = "east", "west"
SIDES = (EAST, WEST)
"""In the order of TraceRow.site: the west is the busy one."""

ONE, UNAWARE, MOVES, KV = MODES = ("one site", "no sites", "sites", "sites and KV")
MAX_MODEL_LEN = 2048
MB = 1_000_000


def mode_names(text: str) -> str:
    """The same text, for --modes. Raises ArgumentTypeError for a name that is none of MODES."""
    for mode in text.split(","):
        if mode not in MODES:
            raise ArgumentTypeError(f"{mode!r} is none of {', '.join(MODES)}")
    return text


def add_link_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--delay-ms", type=above_zero, default=5.0, help="of the link, one way (default %(default)s)")
    parser.add_argument(
        "--mbit-s", type=above_zero, default=1000.0, help="bandwidth of the link in one direction (default %(default)s)"
    )
    parser.add_argument(
        "--kv-share", type=some_of_all, default=0.8, help="part of it that KV may use (default %(default)s)"
    )
    parser.add_argument(
        "--arena-mb", type=positive, default=128, help="KV arena of a node: it drops what its pool keeps"
    )
    parser.add_argument("--pool-mb", type=positive, default=768, help="share of a node in the pool of its site")


def add_load_flags(parser: ArgumentParser) -> None:
    load = BusySite()
    parser.add_argument("--requests", type=positive, default=load.requests, help="in each case (default %(default)s)")
    parser.add_argument("--rate", type=above_zero, default=load.rate_s, help="requests per second of both sites")
    parser.add_argument(
        "--busy-share", type=share, default=load.busy_share, help="part of them that arrives in the west"
    )
    parser.add_argument("--documents", type=positive, default=load.documents, help="that both sites read, by Zipf")
    parser.add_argument("--document-tokens", type=positive, default=load.document_tokens, help="whole blocks of 64")
    parser.add_argument("--answer-tokens", type=positive, default=load.answer_tokens)


def load_of(args: Namespace) -> BusySite:
    """The load that the flags of `add_load_flags` describe."""
    return BusySite(args.requests, args.rate, args.busy_share, args.documents, args.document_tokens, args.answer_tokens)


@dataclass(frozen=True, slots=True)
class TwoSites:
    """`names`: of the nodes, the first half is the east. Milliseconds one way, Mbit/s one way, bytes."""

    names: Sequence[str]
    delay_ms: float
    mbit_s: float
    kv_share: float
    arena_bytes: int
    pool_bytes: int

    @classmethod
    def of(cls, args: Namespace) -> Self:
        """From `--nodes` and the flags of `add_link_flags`. Raises ValueError."""
        names = [name for name, _ in parse_nodes(args.nodes)]
        if len(names) < 2:
            raise ValueError(f"--nodes {args.nodes}: two sites need two nodes or more")
        return cls(names, args.delay_ms, args.mbit_s, args.kv_share, args.arena_mb * MB, args.pool_mb * MB)

    def at(self, side: str) -> list[str]:
        """The names of the nodes of this side."""
        half = len(self.names) // 2
        return list(self.names[:half] if side == EAST else self.names[half:])

    @property
    def budget_bytes_s(self) -> int:
        """Bytes/s of KV that may cross in one direction."""
        return int(self.kv_share * self.mbit_s * 1e6 / 8)

    def network(self, mode: str) -> LinkedSites:
        far = [] if mode == ONE else self.at(WEST)
        return LinkedSites(self.names, far, self.delay_ms, self.mbit_s)

    def flags(self, mode: str) -> list[str]:
        """Of every node."""
        sizes = ("--kv-cache-bytes", self.arena_bytes, "--dram-bytes", self.pool_bytes)
        limit = self.budget_bytes_s if mode == KV else 0
        link = ("--max-model-len", MAX_MODEL_LEN, "--site-link-limit-bytes", limit)
        return [*map(str, (*sizes, *link)), "--transport", "tcp", "--net", "local"]

    def node_flags(self, mode: str) -> dict[str, list[str]]:
        """Name -> its flags."""
        if mode in (ONE, UNAWARE):
            return {}
        return {name: ["--site", side] for side in SIDES for name in self.at(side)}

    def doors(self, cluster: LocalCluster, places: Sequence[int]) -> list[str]:
        """The URL for each request by the site where it arrives: the nodes of that site in turn."""
        urls = [[cluster[name].url for name in self.at(side)] for side in SIDES]
        asked = [0, 0]
        found = []
        for place in places:
            found.append(urls[place][asked[place] % len(urls[place])])
            asked[place] += 1
        return found


def crossed(cluster: LocalCluster, names: Collection[str]) -> float:
    """Bytes of KV that these nodes have read from the other site."""
    nodes = [cluster[name] for name in names]
    found = [NodeClient(node.url, cluster.api_key).text("/metrics").splitlines() for node in nodes]
    counters = [line for lines in found for line in lines if line.startswith("mooncake:site_link_bytes_total{")]
    return sum(float(line.split()[-1]) for line in counters)
