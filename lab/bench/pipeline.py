"""One long prompt on two prefill nodes of one core each, next to one of them alone: as a pipeline, and by tokens.

  scripts/bench.py cpp
  scripts/bench.py cpp --rounds 3 --prompt-tokens 4000 --json out.json

Real node processes, HTTP, streaming clients: two prefill nodes with one thread, each pinned to a core, a decode node
and store nodes that accept requests. One acceptor forms pipelines (--prefill-parallel cpp), one has the nodes divide
the tokens (cp), and one forms no groups, so all ways run on the same processes, in turn. Each round of each way sends a
prompt of --prompt-tokens tokens that is not cached, alone and then together with short prompts every --short-every-ms.
The short prompts also run without a long one. Groups form whatever the estimates say. The target is 0.6 of the time to
first token of one node. The limit is one node's time over what two processes compute at once, compared with one: 2
where the cores share nothing. It is measured while the nodes run and have nothing to do: what they cost in the
background has a core for itself while one node computes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lab.bench.common.client import Client, Outcome, greedy_client, open_session
from lab.bench.common.cores import two_at_once
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.flag_types import natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import pin

NODES = "prefill=2,decode=1,store=4"
NODE_FLAGS = ("--kv-cache-bytes", "500M", "--dram-bytes", "32M", "--num-threads", "1")
WAYS = {"one node": "store-0", "pipeline of two": "store-1", "context parallel of two": "store-2"}
"""Way -> the node that accepts the requests. Ratios refer to the first."""

WARM = "store-3"
"""The node that accepts the first prompts, and gives them to both prefill nodes, which learn their step times."""

SHORT_ALONE_S = 5.0
"""How long short prompts run without a long one."""

WARM_TOKENS, WARM_PROMPTS = 2000, 4
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Round:
    """One way, one long prompt. Milliseconds."""

    way: str
    ttft_ms: float  # of the long prompt alone
    stages: int  # nodes that computed it together
    mixed_ttft_ms: float  # of another long prompt, with short ones
    short_p50_ms: float  # TTFT of the short prompts in that time
    short_p99_ms: float
    shorts: int  # their number
    short_per_s: float  # answered in that time
    short_alone_p50_ms: float  # TTFT of short prompts without a long one
    short_alone_per_s: float
    prefill_cpu_s: float  # processor time of the prefill nodes, for the long prompt alone
    others_cpu_s: float  # and of all other nodes
    parts: list[
        dict[str, Any]
    ]  # what each node of its group did: layers or tokens, chunks, seconds computed and in all


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of each way (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=positive, default=8000, help="long prompt (default %(default)s)")
    parser.add_argument("--short-tokens", type=positive, default=64, help="short prompts (default %(default)s)")
    parser.add_argument(
        "--short-every-ms", type=positive, default=1000, help="between short prompts (default %(default)s)"
    )
    parser.add_argument("--chunk-tokens", type=positive, default=512, help="largest chunk (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), rounds=1, prompt_tokens=1500)


def start(args: Namespace, run_dir: Path) -> LocalCluster:
    always = "--cpp-min-gain=-100"  # estimates of nodes that learn while this runs would decide from round to round
    when = ("--cpp-min-tokens", str(args.prompt_tokens // 2), "--cpp-max-nodes", "2", always)
    pipeline, by_tokens = (("--prefill-parallel", way, *when) for way in ("cpp", "cp"))
    budget = ("--max-num-batched-tokens", str(args.chunk_tokens))
    flags_of: dict[str, tuple[str, ...]] = {
        WAYS["pipeline of two"]: pipeline,
        WAYS["context parallel of two"]: by_tokens,
        WARM: ("--placement", "round-robin"),
    }
    return LocalCluster(NODES, (*NODE_FLAGS, *budget), run_dir=run_dir, role_flags=flags_of)


class Play:
    """The prompts of one run; none is sent twice."""

    def __init__(self, args: Namespace, cluster: LocalCluster) -> None:
        self._args, self._source, self._sent = args, TokenSource(args.seed, 32000), 0
        self._cluster = cluster

    def prompt(self, tokens: int) -> Spec:
        self._sent += 1
        return Spec(self._source.tokens(tokens, SUFFIX, self._sent), 1)

    async def shorts(self, client: Client, until: asyncio.Event) -> list[Outcome]:
        """Short prompts at a fixed rate, until the event."""
        asked: list[asyncio.Task[Outcome]] = []
        while not until.is_set():
            asked.append(asyncio.create_task(client.ask(self.prompt(self._args.short_tokens))))
            await asyncio.sleep(self._args.short_every_ms / 1000)
        return list(await asyncio.gather(*asked))

    async def round(self, client: Client, way: str) -> Round:
        async with asyncio.timeout(PATIENCE_S):
            before = self._cpu_s()
            alone = await client.ask(self.prompt(self._args.prompt_tokens))
            prefill_s, others_s = (after - since for after, since in zip(self._cpu_s(), before, strict=True))
            over = asyncio.Event()
            asyncio.get_running_loop().call_later(SHORT_ALONE_S, over.set)
            quiet = await self.shorts(client, over)
            over = asyncio.Event()
            shorts = asyncio.create_task(self.shorts(client, over))
            mixed = await client.ask(self.prompt(self._args.prompt_tokens))
            over.set()
            during = await shorts
        p50, p99 = np.percentile([1000 * one.ttft_s for one in during], (50, 99))
        return Round(
            way,
            1000 * alone.ttft_s,
            await asyncio.to_thread(stages, client.server.base_url, alone.request_id),
            1000 * mixed.ttft_s,
            float(p50),
            float(p99),
            len(during),
            per_s(during),
            median(1000 * one.ttft_s for one in quiet),
            per_s(quiet),
            prefill_s,
            others_s,
            await asyncio.to_thread(parts, client.server.base_url, alone.request_id),
        )

    def _cpu_s(self) -> tuple[float, float]:
        """Processor time so far of the prefill nodes, and of all others."""
        spent = {node.name: processor_s(node.pid) for node in self._cluster.nodes}
        prefill = sum(seconds for name, seconds in spent.items() if name.startswith("prefill"))
        return prefill, sum(spent.values()) - prefill


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def per_s(outcomes: Sequence[Outcome]) -> float:
    """Answers per second, from the first prompt to the last answer."""
    return len(outcomes) / (max(one.sent_s + one.e2e_s for one in outcomes) - min(one.sent_s for one in outcomes))


def stages(url: str, request_id: str) -> int:
    """Number of nodes that its last placement gave the request's prompt to."""
    group = rest.get(f"{url}/debug/requests/{request_id}")["decisions"][-1]["group"]
    return 1 if group is None else len(group["nodes"])


def parts(url: str, request_id: str) -> list[dict[str, Any]]:
    """What its timeline tells of each node of its group. The answer of one token may end before the others report."""
    told = rest.get(f"{url}/debug/requests/{request_id}")["events"]
    found = [event["detail"] for event in told if event["event"] == "stage"]
    return sorted(found, key=lambda part: int(part["index"]))


async def measure(args: Namespace) -> tuple[list[Round], float, dict[str, Any]]:
    """All rounds, what two processes compute at once over one alone, and the resolved Config of each acceptor."""
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="cpp-") as folder, start(args, Path(folder)) as cluster:
        play = Play(args, cluster)
        for core in range(2):
            pin(cluster[f"prefill-{core}"].pid, core)
        async with open_session() as session:
            clients = {way: await greedy_client(session, way, cluster[node].url) for way, node in WAYS.items()}
            warm = await greedy_client(session, WARM, cluster[WARM].url)
            for _ in range(WARM_PROMPTS):
                await warm.ask(play.prompt(min(WARM_TOKENS, args.prompt_tokens)))
            for number in range(args.rounds):
                for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
                    rounds.append(await play.round(clients[way], way))
            at_once = await asyncio.to_thread(two_at_once)
            configs = {way: client.server.config for way, client in clients.items()}
    return rounds, at_once, configs


METRICS = (
    ("TTFT, long prompt alone", "ms", "ttft_ms"),
    ("TTFT, long prompt with short ones", "ms", "mixed_ttft_ms"),
    ("TTFT of short prompts, median", "ms", "short_p50_ms"),
    ("TTFT of short prompts, p99", "ms", "short_p99_ms"),
    ("short prompts", "1/s", "short_per_s"),
    ("TTFT of short prompts without a long one, median", "ms", "short_alone_p50_ms"),
    ("short prompts without a long one", "1/s", "short_alone_per_s"),
    ("processor time of prefill nodes, long prompt alone", "s", "prefill_cpu_s"),
    ("processor time of other nodes, long prompt alone", "s", "others_cpu_s"),
)


def rows_of(rounds: Sequence[Round], at_once: float, args: Namespace) -> list[Row]:
    """The median of each number over the rounds; the peer of each row is one node. at_once: see `two_at_once`."""
    first = next(iter(WAYS))
    values = {
        (way, key): median(getattr(one, key) for one in rounds if one.way == way)
        for way in WAYS
        for _, _, key in METRICS
    }
    grouped = {way: [one.stages for one in rounds if one.way == way] for way in WAYS if way != first}
    note = (
        f"prompts of {args.prompt_tokens} tokens, {args.rounds} rounds; nodes that computed the long prompts: "
        f"{'; '.join(f'{way} {counts}' for way, counts in grouped.items())}; target of the pipeline: 0.6 of one node; "
        f"two processes on two cores compute {at_once:.2f} times as much as one"
    )

    def limits(way: str, key: str) -> dict[str, float]:
        if way == first or key != "ttft_ms":
            return {}
        return {"two processes computing at once": values[first, key] / at_once}

    few = {way: min(one.shorts for one in rounds if one.way == way) for way in WAYS}
    return [
        Row(
            way,
            metric,
            unit,
            values[way, key],
            {first: values[first, key]},
            limits(way, key),
            note,
            {"ours": few[way], first: few[first]} if key == "short_p99_ms" else {},
        )
        for metric, unit, key in METRICS
        for way in WAYS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    try:
        rounds, at_once, configs = asyncio.run(measure(args))
    except KeyboardInterrupt:
        return 130
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    config = {"benchmark": "cpp", **used, "two_at_once": at_once, "servers": configs}
    report(config | {"rounds_measured": [asdict(r) for r in rounds]}, rows_of(rounds, at_once, args), args.json)
    return 0
