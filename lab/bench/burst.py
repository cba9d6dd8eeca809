"""How many requests of a burst are served, and how fast the others are refused.

  scripts/bench.py burst
  scripts/bench.py burst --offered 100 2000 --rounds 1 --json out.json

Three nodes of this machine (prefill, decode, store) serve the embedded model. All requests of a burst are sent at once
to the decode node, each on its own connection, which is open before; the next burst begins when the nodes are idle.
The served requests are counted, and every refusal must be a 429. The number of served requests must not fall when more
are offered, and refusals should come within 100 ms of their request. Time to first token and time to the end are those
of the served requests. The client is one process that reads the sockets without parsing the events; it shares the cores
with the nodes.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import orjson

from lab.bench.common.rank import quantile
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import TokenSource
from lab.flag_types import natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster

NODES = "prefill=1,decode=1,store=1"
NODE_FLAGS = ("--kv-cache-bytes", "400M", "--dram-bytes", "32M")
GOAL_MS = 100.0
REFUSED, SERVED = 429, 200
END_S = 600.0
CONNECTS = 64
"""Connections that are opened at the same time."""


class Asked(asyncio.Protocol):
    """One request on its own connection, which the server closes after the answer. Times in seconds since `send`."""

    def __init__(self) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.status = 0  # 0: the connection ended without an answer
        self.first_byte_s = self.first_token_s = self.end_s = math.nan
        self.whole = False  # the stream ended with [DONE]
        self._sent_at = 0.0
        self._tail = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._sent_at
        if not self.status:
            self.first_byte_s, self.status = now, int(data[9:12])
        if math.isnan(self.first_token_s) and b"data: " in self._tail + data:
            self.first_token_s = now
        self._tail = (self._tail + data)[-64:]
        self.whole = self.whole or b"data: [DONE]" in self._tail
        self.end_s = now

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    @property
    def served(self) -> bool:
        return self.status == SERVED and self.whole


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument(
        "--offered",
        type=positive,
        nargs="+",
        default=[100, 200, 500, 1000, 2000],
        help="requests at once (default: these)",
    )
    parser.add_argument("--rounds", type=positive, default=3, help="bursts of each size, in turn (default %(default)s)")
    parser.add_argument("--input-len", type=positive, default=32, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--output-len", type=positive, default=8, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    parser.add_argument("--node-flags", default="", help="more flags for every node, in one string")
    args = quicken(parser.parse_args(argv), rounds=1)
    args.offered = sorted(args.offered)[:2] if args.quick else sorted(args.offered)
    return args


def requests(url: str, source: TokenSource, count: int, burst: int, input_len: int, output_len: int) -> list[bytes]:
    """Requests of one burst as bytes; every prompt is new."""
    host = urlsplit(url).netloc
    made = []
    for index in range(count):
        prompt = source.tokens(input_len, burst, index)
        asked = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
        body = orjson.dumps(asked)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        made.append(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


async def burst(url: str, sent: Sequence[bytes]) -> list[Asked]:
    """Open all connections, send all requests, and wait for the end of all."""
    loop, place = asyncio.get_running_loop(), urlsplit(url)
    host, port = str(place.hostname), int(place.port or 80)
    asked: list[Asked] = []
    for start in range(0, len(sent), CONNECTS):
        some = sent[start : start + CONNECTS]
        opened = (loop.create_connection(Asked, host, port) for _ in some)
        asked += [protocol for _, protocol in await asyncio.gather(*opened)]
    for one, request in zip(asked, sent, strict=True):
        one.send(request)
    async with asyncio.timeout(END_S):
        await asyncio.gather(*(one.over for one in asked))
    return asked


async def idle(cluster: LocalCluster) -> None:
    """Wait until no engine has a request."""
    async with asyncio.timeout(END_S):
        while True:
            states = [await asyncio.to_thread(rest.get, f"{node.url}/debug/state") for node in cluster.nodes]
            if not any(engine["running"] + engine["waiting"] for state in states if (engine := state["engine"])):
                return
            await asyncio.sleep(0.2)


def percentile(values: Sequence[float], share: float) -> float | None:
    """None without values."""
    return quantile(values, share) if values else None


def rows_of(offered: int, bursts: Sequence[Sequence[Asked]]) -> list[Row]:
    """Rows of all bursts of one size; the count of served requests is the median of its bursts, the times are those of
    all requests. Raises ValueError if a request got neither tokens nor 429."""
    everyone = [one for asked in bursts for one in asked]
    statuses = Counter(one.status for one in everyone if not one.served)
    if other := {status: count for status, count in statuses.items() if status != REFUSED}:
        raise ValueError(f"of {offered} requests at once some got neither an answer nor 429: {other}")
    served = [one for one in everyone if one.served]
    refused_ms = [1000 * one.first_byte_s for one in everyone if not one.served]
    case = f"{offered:,} at once"
    counts = [sum(one.served for one in asked) for asked in bursts]
    rows = [
        Row(case, "served", "requests", float(median(counts)), limits={"offered": float(offered)}),
        Row(case, "served least", "requests", float(min(counts))),
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        goal = {"goal": GOAL_MS}
        refusals = percentile(refused_ms, share)
        rows.append(Row(case, f"refusal {name}", "ms", refusals, limits=goal, samples={"ours": len(refused_ms)}))
        first = percentile([1000 * one.first_token_s for one in served], share)
        rows.append(Row(case, f"TTFT {name}", "ms", first, samples={"ours": len(served)}))
    end = percentile([1000 * one.end_s for one in served], 0.99)
    rows.append(Row(case, "end p99", "ms", end, samples={"ours": len(served)}))
    return rows


def largest_fall(rows: Sequence[Row]) -> Row:
    """How much the number of served requests falls at most from one size of burst to the next larger one."""
    served = [row.ours or 0.0 for row in rows if row.metric == "served"]
    falls = [before - after for before, after in pairwise(served)]
    return Row("all sizes", "largest fall of served", "requests", max([0.0, *falls]))


async def measure(args: Namespace, run_dir: Path) -> list[Row]:
    """The bursts of all sizes in turn, `args.rounds` times."""
    source = TokenSource(args.seed, 32_000)
    bursts: dict[int, list[list[Asked]]] = {offered: [] for offered in args.offered}
    with LocalCluster(NODES, (*NODE_FLAGS, *args.node_flags.split()), run_dir=run_dir) as cluster:
        url = cluster["decode-0"].url
        await burst(url, requests(url, source, 4, 0, args.input_len, args.output_len))  # so that all nodes are known
        number = 0
        for _ in range(args.rounds):
            for offered in args.offered:
                number += 1
                await idle(cluster)
                sent = requests(url, source, offered, number, args.input_len, args.output_len)
                bursts[offered].append(await burst(url, sent))
        cluster.check()
    rows = [row for offered, found in bursts.items() for row in rows_of(offered, found)]
    return [*rows, largest_fall(rows)]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    with tempfile.TemporaryDirectory(prefix="burst-") as folder:
        rows = asyncio.run(measure(args, Path(folder)))
    shown = {name: value for name, value in vars(args).items() if name != "json"}
    report({"benchmark": "burst", "nodes": NODES, **shown}, rows, args.json)
    return 0
