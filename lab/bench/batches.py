"""Offline prompts as one batch (/v1/batches), the same prompts online, and interactive requests next to the batch.

  scripts/bench.py batches
  scripts/bench.py batches --prompts 200 --tokens 32 --json out.json

One cluster of a prefill and a decode node. First two measurements in turns, --rounds of each:

    interactive alone        requests of class interactive arrive at --rate per second for --seconds
    interactive and batch    the same arrivals while batches of --prompts run, one after the other

The medians and 99th percentiles are over the requests of all rounds. Then two, one after the other:

    batch                    a batch of --prompts alone: tokens per second from its creation to its end
    online                   the same prompts as requests over HTTP, --concurrency at a time

Every prompt is new, so no prefix is found.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from lab.bench.common.client import GREEDY, Client, Outcome, find_server, open_session
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.flag_types import above_zero, natural, positive
from lab.launch.cluster import LocalCluster

NODES = "prefill=1,decode=1"
NODE_FLAGS = ("--kv-cache-bytes", "400M", "--dram-bytes", "32M")
DEADLINE_S = 7200.0
POLL_S = 0.1
FIRST_OFFLINE = 1_000_000
"""Names of offline prompts begin here, and those of arrivals at 0."""

OVER = 409
"""The answer to the cancellation of a batch that has ended meanwhile."""

ENDED = {"completed", "failed", "expired", "cancelled"}
GOAL = 1.1
"""The interactive p99 next to a batch over that alone (at most 10 % more)."""


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--prompts", type=positive, default=1000, help="lines of the batch (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=positive, default=64, help="of each (default %(default)s)")
    parser.add_argument("--tokens", type=positive, default=16, help="of each answer (default %(default)s)")
    parser.add_argument("--concurrency", type=positive, default=32, help="online and batch (default %(default)s)")
    parser.add_argument("--rate", type=above_zero, default=1.0, help="interactive requests/s (default %(default)s)")
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="of arrivals per round (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=4, help="alone and next to a batch (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of prompts and arrivals (default %(default)s)")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), prompts=24, seconds=3.0, rounds=2)


class Offline:
    """The batches of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, f"{url}/v1", model

    async def begin(self, specs: Sequence[Spec]) -> str:
        """The id of a new batch."""
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": self._body(spec)}
            for number, spec in enumerate(specs)
        ]
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", b"\n".join(map(orjson.dumps, lines)), filename="prompts.jsonl")
        given = await self._json("POST", "/files", data=form)
        body = {"input_file_id": given["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str((await self._json("POST", "/batches", json=body))["id"])

    def _body(self, spec: Spec) -> dict[str, Any]:
        return GREEDY | {"model": self._model, "prompt": spec.token_ids, "max_tokens": spec.output_len}

    async def until(self, batch_id: str, *states: str) -> dict[str, Any]:
        """Raises RuntimeError for a batch that failed, or with lines that failed."""
        while (batch := await self._batch(batch_id))["status"] not in states:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(POLL_S)
        return batch

    async def _batch(self, batch_id: str) -> dict[str, Any]:
        batch = await self._json("GET", f"/batches/{batch_id}")
        if batch["status"] in ENDED - {"completed"}:
            raise RuntimeError(f"the batch {batch['status']}: {batch['errors']}")
        if batch["request_counts"]["failed"]:
            raise RuntimeError(f"{batch['request_counts']['failed']} lines of the batch failed")
        return batch

    @asynccontextmanager
    async def running(self, specs: Iterator[Sequence[Spec]]) -> AsyncIterator[None]:
        """While the block runs, one batch follows the other; the last one is cancelled. Raises what `until` raises."""
        over = False

        async def follow(batch_id: str) -> None:
            while not over:
                if (await self._batch(batch_id))["status"] == "completed":
                    batch_id = await self.begin(next(specs))
                await asyncio.sleep(POLL_S)
            async with self._session.post(f"{self._url}/batches/{batch_id}/cancel") as answer:
                if answer.status not in (200, OVER):
                    raise RuntimeError(f"a cancelled batch answers {answer.status}: {await answer.text()}")
            while (await self._json("GET", f"/batches/{batch_id}"))["status"] not in ENDED:  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(POLL_S)

        first = await self.begin(next(specs))
        await self.until(first, "in_progress", "finalizing", "completed")
        following = asyncio.create_task(follow(first))
        try:
            yield
        finally:
            over = True
            await following

    async def _json(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        async with self._session.request(method, self._url + path, **body) as answer:
            found: dict[str, Any] = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"{method} {path} answers {answer.status}: {found}")
            return found


def arrivals(args: Namespace, source: TokenSource, run: int) -> list[Spec]:
    """The times of a round are the same alone and next to a batch; every run has prompts of its own."""
    rng = np.random.default_rng([args.seed, 7, run // 2])
    at, specs = 0.0, list[Spec]()
    while (at := at + float(rng.exponential(1 / args.rate))) < args.seconds:
        specs.append(Spec(source.tokens(args.prompt_tokens, SUFFIX, run, len(specs)), args.tokens, at))
    return specs or [Spec(source.tokens(args.prompt_tokens, SUFFIX, run, 0), args.tokens)]


def offline(args: Namespace, source: TokenSource, run: int) -> list[Spec]:
    return [Spec(source.tokens(args.prompt_tokens, SUFFIX, run, i), args.tokens) for i in range(args.prompts)]


async def measure(args: Namespace, url: str) -> tuple[list[Row], dict[str, Any]]:
    source = TokenSource(args.seed, 32_000)
    async with open_session() as session:
        server = await find_server(session, "ours", url, None)
        batches = Offline(session, url, server.model)
        urgent = Client(session, server, "openai", GREEDY | {"service_class": "interactive"})
        plain = Client(session, server, "openai", GREEDY)
        await _answered(plain, offline(args, source, FIRST_OFFLINE - 1)[:8], 4)  # first steps are slow
        prompts = (offline(args, source, run) for run in count(FIRST_OFFLINE))
        alone, next_to = list[Outcome](), list[Outcome]()
        for turn in range(args.rounds):
            alone += await _answered(urgent, arrivals(args, source, 2 * turn), None)
            async with batches.running(prompts):
                next_to += await _answered(urgent, arrivals(args, source, 2 * turn + 1), None)
        batch = await _throughput(batches, next(prompts))
        begun = time.perf_counter()
        online = await _answered(plain, next(prompts), args.concurrency)
        online_s = time.perf_counter() - begun
        tokens_per_s = sum(one.output_tokens for one in online) / online_s
    return [
        Row("batch", "output tokens", "tokens/s", batch, {"online": tokens_per_s}),
        Row("online", "output tokens", "tokens/s", tokens_per_s),
        *_compared("TTFT", [one.ttft_s for one in next_to], [one.ttft_s for one in alone]),
        *_compared("TBT", _gaps(next_to), _gaps(alone)),
    ], server.config or {}


async def _answered(client: Client, specs: Sequence[Spec], at_once: int | None) -> list[Outcome]:
    outcomes, _ = await client.run(specs, at_once, DEADLINE_S, lambda: None)
    errors = [one.error for one in outcomes if one.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first: {errors[0]}")
    return outcomes


async def _throughput(batches: Offline, specs: Sequence[Spec]) -> float:
    """Output tokens per second."""
    batch_id, begun = await batches.begin(specs), time.perf_counter()
    batch = await batches.until(batch_id, "completed")
    return float(batch["usage"]["output_tokens"] / (time.perf_counter() - begun))


def _gaps(outcomes: Sequence[Outcome]) -> list[float]:
    return [gap for one in outcomes for gap in one.itl_s]


def _compared(metric: str, next_to: Sequence[float], alone: Sequence[float]) -> list[Row]:
    """The median and the 99th percentile of the interactive requests next to a batch, against those alone. Answers of
    one token have no gap, so no value."""
    rows, both = [], {"ours": len(next_to), "alone": len(alone)}
    for share in (50, 99):
        with_batch, without = (
            1000 * float(np.percentile(found, share)) if found else None for found in (next_to, alone)
        )
        goal = {"goal": GOAL * without} if share == 99 and without is not None else {}
        name = f"{metric} p{share}"
        rows.append(Row("interactive alone", name, "ms", without, samples={"ours": len(alone)}))
        rows.append(Row("interactive and batch", name, "ms", with_batch, {"alone": without}, goal, samples=both))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    with tempfile.TemporaryDirectory(prefix="batches-") as folder:
        kept = ("--batch-path", f"{folder}/kept", "--batch-concurrency", str(args.concurrency))
        roles = {"prefill": kept}
        with LocalCluster(NODES, NODE_FLAGS, run_dir=Path(folder), role_flags=roles) as cluster:
            rows, config = asyncio.run(measure(args, cluster.nodes[0].url))
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report({"benchmark": "batches", **used, "server": config}, rows, args.json)
    return 0
