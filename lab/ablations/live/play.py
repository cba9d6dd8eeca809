"""Starts nodes on this machine, each on separate cores, and sends requests to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.ablations.live.loads import VOCABULARY
from lab.bench.common.client import Client, Outcome, greedy_client, open_session
from lab.bench.common.latency import tpot_s
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.launch.cluster import LocalCluster, Network, Processes, Where
from lab.launch.nodes import pin
from lab.simulator.result import spread

WARM_TOKENS, WARM_SEED = 600, 999_983
HOUR_S = 3600
PATIENCE_S = 60.0
"""Requests that are unfinished this long after the last arrival count as failed, seconds."""


@dataclass(frozen=True, slots=True)
class Played:
    """One run as the clients saw it."""

    outcomes: list[Outcome]
    seconds: float
    config: dict[str, Any] | None  # of the first door, if it shows its Config


@contextmanager
def pinned(
    nodes: str,
    flags: Sequence[str],
    run_dir: Path,
    role_flags: Mapping[str, Sequence[str]] | None = None,
    network: Network | None = None,
    api_key: str | None = None,
) -> Iterator[LocalCluster]:
    """A cluster whose i-th node has one thread on the i-th core, modulo the number of cores. The client, this process,
    uses the remaining cores, or all cores if none remains."""
    run_dir.mkdir(parents=True)
    cores = os.sched_getaffinity(0)
    one = LocalCluster(
        nodes,
        ("--num-threads", "1", *flags),
        run_dir=run_dir,
        role_flags=role_flags,
        processes=Processes({"OMP_NUM_THREADS": "1"}),
        where=Where(network=network),
        api_key=api_key,
    )
    with one as cluster:
        try:
            for index, node in enumerate(cluster.nodes):
                pin(node.pid, index)
            os.sched_setaffinity(0, set(sorted(cores)[len(cluster.nodes) :]) or cores)
            yield cluster
        finally:
            os.sched_setaffinity(0, cores)


def doors(cluster: LocalCluster) -> list[str]:
    """URLs of the nodes that run a model; requests are sent to them in turn."""
    return [node.url for node in cluster.nodes if node.role != "store"]


def play(
    urls: Sequence[str],
    specs: Sequence[Spec],
    on_done: Callable[[], None] = lambda: None,
    warm: bool = False,
    places: Sequence[int] | None = None,
) -> Played:
    """Send every spec at its time, to the doors in turn, or to the door that `places` gives for it. warm: first send
    one request through each door. Raises Unreachable."""
    return asyncio.run(_play(urls, specs, on_done, warm, places or [i % len(urls) for i in range(len(specs))]))


async def _play(
    urls: Sequence[str], specs: Sequence[Spec], on_done: Callable[[], None], warm: bool, places: Sequence[int]
) -> Played:
    async with open_session() as session:
        clients = [await greedy_client(session, "node", url) for url in urls]
        if warm:
            await warm_up(clients)
        deadline_s = max(spec.at_s for spec in specs) + PATIENCE_S
        parts = [[i for i, place in enumerate(places) if place == door] for door in range(len(urls))]
        runs = await asyncio.gather(
            *(
                client.run([specs[i] for i in part], None, deadline_s, on_done)
                for client, part in zip(clients, parts, strict=True)
            )
        )
    outcomes = {i: one for part, (own, _) in zip(parts, runs, strict=True) for i, one in zip(part, own, strict=True)}
    return Played(
        [outcomes[i] for i in range(len(specs))], max(seconds for _, seconds in runs), clients[0].server.config
    )


def warmed(urls: Sequence[str]) -> dict[str, Any] | None:
    """Sends the first requests through every door; returns the Config of the first door, if it shows it. Raises
    Unreachable."""
    return play(urls, [Spec(TokenSource(WARM_SEED, VOCABULARY).tokens(64, SUFFIX, len(urls)), 4)], warm=True).config


def one_by_one(url: str, specs: Sequence[Spec]) -> list[Outcome]:
    """Sends each spec when the previous one has ended; arrival times are ignored."""

    async def send_all() -> list[Outcome]:
        async with open_session() as session:
            client = await greedy_client(session, "node", url)
            outcomes = [Outcome() for _ in specs]
            for spec, outcome in zip(specs, outcomes, strict=True):
                await client.send(spec, outcome)
        return outcomes

    return asyncio.run(send_all())


async def warm_up(clients: Sequence[Client]) -> None:
    """The first steps are slow, and the first estimates are guesses. Raises Unreachable with the server's message."""
    source = TokenSource(WARM_SEED, VOCABULARY)
    for index, client in enumerate(clients):
        await client.ask(Spec(source.tokens(WARM_TOKENS, SUFFIX, index), 8))


def costs(
    played: Played, prices: Mapping[str, float], busy_s: Mapping[str, float], ttft_slo_s: float, tbt_slo_s: float
) -> dict[str, float | None]:
    """Of a run, as lab.simulator.result has them, over the prompt and answer tokens of the requests that met their
    objectives. prices: of a node per hour, paid from the first request to the last token, or for busy_s alone: the
    seconds in which it computed."""
    hours = played.seconds / HOUR_S
    kept = [one for one in played.outcomes if _kept(one, ttft_slo_s, tbt_slo_s)]
    tokens = sum(one.prompt_tokens + one.output_tokens for one in kept)
    paid = hours * sum(prices.values())
    busy = sum(price * busy_s[name] for name, price in prices.items()) / HOUR_S
    return {
        "node_hours": len(prices) * hours,
        "cost_per_million_tokens": 1e6 * paid / tokens if tokens else None,
        "busy_cost_per_million_tokens": 1e6 * busy / tokens if tokens else None,
    }


def _kept(one: Outcome, ttft_slo_s: float, tbt_slo_s: float) -> bool:
    return one.error is None and one.ttft_s <= ttft_slo_s and tpot_s(one) <= tbt_slo_s


def figures(played: Played, ttft_slo_s: float, tbt_slo_s: float) -> dict[str, Any]:
    """The figures of lab.simulator.result that a client can see, and failures except refusals: `errors`, and `failed`,
    their share of the requests, which are in no latency."""
    outcomes = played.outcomes
    good = [one for one in outcomes if one.error is None]
    refused = sum(one.error is not None and one.error.startswith("status 429") for one in outcomes)
    kept = sum(_kept(one, ttft_slo_s, tbt_slo_s) for one in good)
    several = [one for one in good if one.output_tokens > 1]
    tokens = sum(one.prompt_tokens for one in good)
    return {
        "requests": len(outcomes),
        "finished": len(good),
        "refused": refused,
        "failed": (len(outcomes) - len(good) - refused) / len(outcomes),
        "errors": sorted({one.error for one in outcomes if one.error and not one.error.startswith("status 429")}),
        "seconds": played.seconds,
        "ttft_s": spread([one.ttft_s for one in good]),
        "tbt_s": spread([tpot_s(one) for one in several]),
        "longest_gap_s": spread([max(one.itl_s) for one in several if one.itl_s]),
        "first_gap_s": spread([one.itl_s[0] for one in several if one.itl_s]),
        "goodput": kept / len(outcomes),
        "output_tokens_s": sum(one.output_tokens for one in good) / played.seconds,
        "token_hit_rate": sum(one.cached_tokens for one in good) / tokens if tokens else 0.0,
    }
