"""Runs a live ablation seed by seed with rotating case order, so that a slow period of the machine affects every
case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.ablations.common.ablation import Outcome
from lab.ablations.live.case import LiveAblation, LiveCase, naming_failures
from lab.ablations.live.play import Played, costs, doors, figures, pinned, play, warmed
from lab.ablations.live.shares import CpuShares, Watch
from lab.ablations.live.throttle import throttled
from lab.bench.common.client import Unreachable
from lab.bench.common.workload import Spec

TTFT_SLO_S, TBT_SLO_S = 2.0, 0.1
"""The limits of a good request."""


def run(
    ablation: LiveAblation, seeds: int, seconds: float, run_dir: Path, tell: Callable[[str], None]
) -> Outcome[LiveCase]:
    """Runs seeds 0..seeds-1 of every case, each on a new cluster. `tell` is called before each run. Raises Unreachable,
    NodeDied, StartTimeout, RestError, ValueError."""
    cases = ablation.cases(None)
    raw: dict[str, list[dict[str, Any]]] = {case.label: [] for case in cases}
    configs: dict[str, Any] = {}
    for seed in range(seeds):
        for number, case in list(enumerate(cases))[:: 1 if seed % 2 == 0 else -1]:
            tell(f"{case.label}, seed {seed}")
            found, configs[case.label] = run_case(case, seed, seconds, run_dir / f"{seed}-{number}")
            raw[case.label].append(found)
    about = replace(ablation, paper_source="no figure for machines like these")
    outcome = Outcome.of(about, cases, raw, f"open loop of {seconds:g} s by seed, live")
    return replace(outcome, nodes=configs)


def run_case(case: LiveCase, seed: int, seconds: float, run_dir: Path) -> tuple[dict[str, Any], Any]:
    """(figures, the first node's Config if it shows it)"""
    specs = case.workload.specs(seed, seconds)
    if case.url:
        found, played = send(case, [case.url], {}, specs)
        return found, played.config
    case.prepare()
    told: dict[str, Any] = {}
    with pinned(case.nodes, case.flags, run_dir, case.slow.flags) as cluster, throttled(cluster, case.slow, told):
        found, played = send(case, doors(cluster), {node.name: node.pid for node in cluster.nodes}, specs)
    return found | told | spent(case, played, found["cores"], told.get("ran", 1.0)), played.config


def send(
    case: LiveCase, urls: Sequence[str], pids: dict[str, int], specs: Sequence[Spec]
) -> tuple[dict[str, Any], Played]:
    """(figures but for the costs, the run). pids: of the nodes, by name; nobody here knows the nodes behind a URL."""
    warmed(urls)
    look, watch = case.look(urls), Watch(pids)
    played = play(urls, specs)
    found = figures(played, TTFT_SLO_S, TBT_SLO_S) | {"cores": watch.end()}
    if not found["finished"]:
        raise Unreachable(f"{case.label}: every request failed: {found['errors']}")
    return found | look(played), played


def spent(case: LiveCase, played: Played, cores: CpuShares, ran: float) -> dict[str, float | None]:
    """The costs of a run. ran: the share of the time in which the slow nodes could run, as measured."""
    prices = {name: case.slow.price(name) for name in cores.others}
    busy_s = {name: case.slow.busy_s(name, cores.seconds * share, ran) for name, share in cores.others.items()}
    return costs(played, prices, busy_s, TTFT_SLO_S, TBT_SLO_S)


def at_urls(ablation: LiveAblation, urls: Sequence[tuple[str, str]]) -> LiveAblation:
    """The same on running clusters instead of its own: every workload of it at every (label, url). Its reading is for
    cases with the labels of its own."""
    own = ablation.cases(None)
    loads = {case.workload.name: case for case in own}.values()
    cases = [
        LiveCase(f"{label}, {one.workload.name}" if len(loads) > 1 else label, one.workload, url=url, look=one.look)
        for label, url in urls
        for one in loads
    ]
    if {case.label for case in own} <= {case.label for case in cases}:
        return replace(ablation, cases=lambda requests: cases)
    reading = "These are running clusters with their own configuration."
    return replace(ablation, cases=lambda requests: cases, reading=naming_failures(lambda values: reading))
