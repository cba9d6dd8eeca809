"""Checks plans against the simulator, with random loads and objectives. It compares the formula's node count with the
fewest simulated nodes.

  scripts/tools.py check-plan                    # 30 cases of 6000 requests
  scripts/tools.py check-plan --cases 5 --requests 800 --seed 7

A case is good if each role is within one node or 10 % of the simulated minimum, or if a load that the plan calls
infeasible also misses its objectives on a large cluster. The simulated minimum of a role is searched with plenty of
nodes of the other role: TTFT depends on the prefill nodes, the time between tokens on the decode nodes. Placement is
central and every prefix comes from the pool, as the formulas assume; scripts/ablate.py shows the regret of other
policies.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.bench.common.results import write_result
from lab.flag_types import file_to_write, natural, positive
from lab.formulas.loads import drawn, load_of
from lab.formulas.plan import Decode, Infeasible, Load, Objective, Prefill, plan
from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import PRESETS
from lab.simulator.result import kept

POOL_BLOCKS = 200_000  # of a node: large enough that no block is evicted
SEARCH_DISTANCE = 8  # maximum distance of the search from the plan, nodes
WARM_UP = 0.2  # share of the requests that warm up the cluster: formulas describe the steady state
SHARE, SLACK = 0.9, 0.02  # share of requests; slack for objectives that an empty cluster just meets
WANTED = 0.9  # share of the cases that must be good


@dataclass(frozen=True, slots=True)
class Checked:
    """A case: the question, and the nodes by formula and simulated; None = infeasible."""

    model: str
    rate: float
    ttft_s: float
    tbt_s: float
    hit_rate: float
    planned: tuple[int, int] | None
    simulated: tuple[int, int] | None

    @property
    def good(self) -> bool:
        if self.planned is None or self.simulated is None:
            return self.planned == self.simulated
        return all(abs(p - s) <= max(1, 0.1 * s) for p, s in zip(self.planned, self.simulated, strict=True))

    def row(self) -> dict[str, Any]:
        case = f"{self.model}, {self.rate:.3g} requests/s"
        planned, simulated = (sum(nodes) if nodes else None for nodes in (self.planned, self.simulated))
        here = {
            "case": case,
            "metric": "nodes planned",
            "unit": "nodes",
            "ours": planned,
            "peers": {"simulated": simulated},
        }
        return here | asdict(self)


@dataclass(frozen=True, slots=True)
class Question:
    """A load and its objectives."""

    model: str
    rows: list[TraceRow]
    load: Load
    objective: Objective


def question(seed: int, requests: int) -> Question:
    """A question drawn so that one to twelve prefill nodes are busy, with objectives from impossible to easy."""
    rng = Random(seed)
    name = rng.choice(("llama3-70b-8xa800", "llama3-8b-h200"))
    model = PRESETS[name]
    prompt, answer = (rng.uniform(1500, 12_000), rng.uniform(0.3, 1.2)), (rng.uniform(80, 400), rng.uniform(0.3, 1.0))
    shared = rng.choice((0.0, 0.3, 0.8))
    draft = drawn(seed, requests, prompt, answer, 1.0, shared)
    whole = load_of(draft, 1.0, POOL_BLOCKS)
    alone = Prefill(model, whole)
    rate = rng.uniform(1, 12) / alone.offered
    rows = [TraceRow(row.timestamp_ms / rate, row.input_length, row.output_length, row.hash_ids) for row in draft]
    unloaded = np.sort(alone.service + alone.fetch)
    step_s = model.decode_s(1, round(prompt[0]))
    ttft_s = float(unloaded[int(0.9 * requests)]) * rng.uniform(0.9, 6)
    if abs(float(np.mean(unloaded <= ttft_s)) - SHARE) < SLACK:
        ttft_s *= 1.3
    objective = Objective(ttft_s, step_s * rng.uniform(1.25, 3), SHARE)
    return Question(name, rows, load_of(rows, rate, POOL_BLOCKS), objective)


def simulated(asked: Question, prefill: int, decode: int) -> tuple[float, float]:
    """(share of requests within the TTFT objective, share within the objective between tokens)"""
    config = SimConfig(
        model=asked.model, prefill=prefill, decode=decode, placement="mooncake-central-greedy", cache_blocks=0,
        pool_blocks=POOL_BLOCKS // (prefill + decode) + 1,
    )  # fmt: skip
    cluster = Cluster(config).played(asked.rows)
    steady = cluster.jobs[round(WARM_UP * len(cluster.jobs)) :]
    ttft = sum(kept(job, asked.objective.ttft_s, math.inf) for job in steady)
    tbt = sum(kept(job, math.inf, asked.objective.tbt_s) for job in steady)
    return ttft / len(steady), tbt / len(steady)


def search(begin: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest sufficient number near `begin`; None if there is none within SEARCH_DISTANCE."""
    if enough(begin):
        while begin > 1 and enough(begin - 1):
            begin -= 1
        return begin
    for number in range(begin + 1, begin + SEARCH_DISTANCE + 1):
        if enough(number):
            return number
    return None


def check(seed: int, requests: int) -> Checked:
    asked = question(seed, requests)
    model, load, objective = PRESETS[asked.model], asked.load, asked.objective
    try:
        best = plan(model, load, objective, 1.0, 1.0).best
        planned = best.prefill, best.decode
    except Infeasible:
        planned = None
    p, d = planned or (2 * math.ceil(Prefill(model, load).offered) + 4, 0)
    d = d or next(n for n in range(1, 1000) if Decode(model, load).fits(n, objective.share)) * 2 + 4
    found: tuple[int, int] | None = None
    prefill = search(p, lambda n: simulated(asked, n, 2 * d)[0] >= objective.share)
    decode = search(d, lambda n: simulated(asked, p + 2, n)[1] >= objective.share) if prefill else None
    if prefill is not None and decode is not None:
        found = prefill, decode
    return Checked(asked.model, load.rate, objective.ttft_s, objective.tbt_s, load.hit_rate, planned, found)


def shown(results: Sequence[Checked]) -> Table:
    made = Table(title="prefill and decode nodes")
    for name in ("model", "requests/s", "TTFT, s", "between, ms", "found", "planned", "simulated", ""):
        made.add_column(name, justify="right")
    for one in results:
        planned, found = (f"{n[0]}P {n[1]}D" if n else "infeasible" for n in (one.planned, one.simulated))
        made.add_row(
            one.model, f"{one.rate:.3g}", f"{one.ttft_s:.3g}", f"{1000 * one.tbt_s:.3g}", f"{one.hit_rate:.0%}",
            planned, found, "" if one.good else "off",
        )  # fmt: skip
    return made


def main(argv: Sequence[str] | None = None) -> int:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--cases", type=positive, default=30)
    made.add_argument("--requests", type=positive, default=6000, help="requests per simulation (default: 6000)")
    made.add_argument("--seed", type=natural, default=0, help="seed of the first case; the others follow")
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--workers", type=positive, default=cores, help=f"processes (default: {cores}, the cores)")
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write the cases and the whole configuration")
    args = made.parse_args(argv)
    if args.cases < 1 or args.workers < 1 or args.requests < 50:
        made.error("--cases and --workers must be at least 1, --requests at least 50")
    results: list[Checked] = []
    with Progress(console=Console(stderr=True)) as bar, ProcessPoolExecutor(args.workers) as pool:
        task = bar.add_task("cases", total=args.cases)
        for future in [pool.submit(check, args.seed + i, args.requests) for i in range(args.cases)]:
            results.append(future.result())
            bar.advance(task)
    good = sum(one.good for one in results) / len(results)
    console = Console()
    console.print(shown(results))
    console.print(f"{good:.0%} of {len(results)} cases within one node or 10 % (wanted: {WANTED:.0%})")
    if args.json:
        config = {"cases": args.cases, "requests": args.requests, "seed": args.seed, "good": good}
        write_result(config, [one.row() for one in results], args.json)
    return 0 if good >= WANTED else 1
