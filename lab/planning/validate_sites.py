"""Two sites, live and simulated: the same requests over a real link and through the simulator's sites.

  scripts/tools.py validate-sites                                # one mixed node per site, each on one core; as root
  scripts/tools.py validate-sites --delay-ms 20 --mbit-s 400 --json out.json

Three clusters of real nodes get the same requests at the same times (lab/loads/busy_site.py): one site with all nodes,
two sites without KV between them, two sites with it. Nodes of two sites are in network namespaces, with a relay that
delays and paces what crosses (lab/faults/networks/). In the first cluster a step model is fitted to other requests, as
scripts/tools.py validate does. Then lab/simulator/sites/ gets the requests, with this model, the nodes' configuration,
and the delay, rate and budget of the link. Exit code 1 if a goal is missed: p99 of first tokens and KV over the link
within 20 %; 3 if network namespaces are not available.
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.config.flags import UsageError
from lab.ablations.live.calibrate import Calibrated, calibrate
from lab.ablations.live.fetches import fetches
from lab.ablations.live.loads import in_blocks, specs
from lab.ablations.live.play import figures, pinned, play, warmed
from lab.ablations.live.twin import base_model, twin
from lab.bench.common.client import Outcome, Unreachable
from lab.bench.common.results import write_result
from lab.faults.networks.namespaces import NoNamespaces
from lab.faults.networks.two_sites import (
    KV,
    MODES,
    ONE,
    UNAWARE,
    TwoSites,
    add_link_flags,
    add_load_flags,
    crossed,
    load_of,
    mode_names,
)
from lab.faults.runner import API_KEY, UNAVAILABLE
from lab.flag_types import file_to_write, natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied, StartTimeout
from lab.launch.nodes import parse_nodes
from lab.loads.trace import TraceRow
from lab.one_line import refuse
from lab.simulator.config import SimConfig
from lab.simulator.sites.figures import figures as figures_of_sites
from lab.simulator.sites.rules import SiteRules
from lab.simulator.sites.sites import Sites

SIMULATED = tuple(mode for mode in MODES if mode != UNAWARE)
"""The simulator has no nodes that do not know of a link between them."""

LOAD = {"requests": 240, "rate": 3.0, "documents": 48, "document_tokens": 1024, "arena_mb": 96}
"""Of the embedded model in bfloat16: enough prefixes cross that one more or less is no miss of the goal."""

GOAL = 0.2
METRICS = (
    ("TTFT mean", "s", ("ttft_s", "mean"), None),
    ("TTFT p50", "s", ("ttft_s", "p50"), None),
    ("TTFT p99", "s", ("ttft_s", "p99"), GOAL),
    ("found prefixes", "of the tokens", ("token_hit_rate",), None),
)
"""(label, unit, figure, maximum error)"""
OF_LINK = ("KV over the link", "bytes", ("link_bytes",), GOAL)


@dataclass(frozen=True, slots=True)
class Agreement:
    """One figure of one case, live and simulated."""

    case: str
    metric: str
    unit: str
    live: float
    simulated: float
    goal: float | None

    @property
    def ratio(self) -> float | None:
        """Simulated / live; None if there was none of it live, so that nothing is validated."""
        return self.simulated / self.live if self.live else None

    @property
    def met(self) -> bool:
        return self.goal is None or (self.ratio is not None and abs(self.ratio - 1) <= self.goal)

    def row(self) -> dict[str, Any]:
        here = {"case": self.case, "metric": self.metric, "unit": self.unit, "ours": self.simulated}
        return here | {"peers": {"live": self.live}, "ratio": self.ratio, "goal": self.goal, "met": self.met}


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the simulator must know of the nodes: their resolved Config, KV tokens of an arena, and the fitted model."""

    config: dict[str, Any]
    kv_tokens: int
    calibrated: Calibrated


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("--nodes", default="mixed=2", help="mixed nodes, half of them at each site (default %(default)s)")
    made.add_argument(
        "--modes", type=mode_names, default=",".join(SIMULATED), help="clusters to compare (default %(default)s)"
    )
    add_link_flags(made)
    add_load_flags(made)
    made.set_defaults(**LOAD)
    made.add_argument("--fit-requests", type=positive, default=60, help="for the fit (default %(default)s)")
    made.add_argument("--seed", type=natural, default=1, help="seed of the measured requests (default %(default)s)")
    made.add_argument(
        "--fit-seed", type=natural, default=2, help="seed of the requests for the fit (default %(default)s)"
    )
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write all measurements")
    made.add_argument("node_flags", nargs="*", metavar="-- FLAG", help="more flags of every node, after --")
    return made


def checked(args: Namespace) -> TwoSites:
    """The two sites. Raises ValueError for flags of which the simulator cannot have a counterpart."""
    if args.seed == args.fit_seed:
        raise ValueError("--seed and --fit-seed must differ: a model reproduces the data it was fitted to")
    if strange := [mode for mode in args.modes.split(",") if mode not in SIMULATED]:
        raise ValueError(f"--modes {strange[0]!r} is none of {', '.join(SIMULATED)}")
    roles = [role for _, role in parse_nodes(args.nodes)]
    if set(roles) != {"mixed"} or len(roles) % 2:
        raise ValueError(f"--nodes {args.nodes}: simulated sites are alike, so give an even number of mixed nodes")
    return TwoSites.of(args)


def rules(mode: str, sites: TwoSites) -> SiteRules:
    """The simulated link."""
    return SiteRules(
        sites=1 if mode == ONE else 2,
        distance_s=2 * sites.delay_ms / 1000,
        link_gbit_s=sites.mbit_s / 1000,
        budget=sites.kv_share,
        kv="copies" if mode == KV else "none",
    )


def config_of(mode: str, sites: TwoSites, nodes: Nodes) -> SimConfig:
    """The simulated nodes of one site: as `twin` has them, and each with its share of the pool."""
    count = len(sites.names) // (1 if mode == ONE else 2)
    made = twin(f"mixed={count}", nodes.config, nodes.kv_tokens, nodes.calibrated.contention)
    block_bytes = made.block_tokens * int(nodes.config["kv_cache_bytes"]) // nodes.kv_tokens
    return replace(made, pool_blocks=int(nodes.config["dram_bytes"]) // block_bytes)


def simulated(mode: str, sites: TwoSites, nodes: Nodes, rows: Sequence[TraceRow]) -> dict[str, Any]:
    config = config_of(mode, sites, nodes)
    run = Sites(config, rules(mode, sites), nodes.calibrated.model).played(in_blocks(rows, config.block_tokens))
    return figures_of_sites(run, float("inf"), float("inf"))


def compared(mode: str, live: dict[str, Any], ours: dict[str, Any]) -> list[Agreement]:
    """The rows of a case."""
    made = []
    for name, unit, path, goal in (*METRICS, OF_LINK) if mode == KV else METRICS:
        made.append(Agreement(mode, name, unit, _at(live, path), _at(ours, path), goal))
    return made


def _at(found: dict[str, Any], path: Sequence[str]) -> float:
    value: Any = found
    for name in path:
        value = value[name]
    return float(value)


def measured(
    mode: str, args: Namespace, sites: TwoSites, rows: Sequence[TraceRow], run_dir: Path, fits: bool, console: Console
) -> tuple[dict[str, Any], Nodes | None]:
    """(live figures, the nodes if this cluster is to be fitted to). Raises Unreachable, ValueError, OSError."""
    flags = [*sites.flags(mode), "--record-steps", f"{run_dir}/{{node}}.steps", *args.node_flags]
    with (
        sites.network(mode) as network,
        pinned(args.nodes, flags, run_dir, sites.node_flags(mode), network, API_KEY) as cluster,
        console.status(f"{mode}: {len(rows)} requests") as status,
    ):
        urls = [cluster[name].url for name in sites.names]
        warmed(urls)
        before = crossed(cluster, sites.names)
        doors = sites.doors(cluster, [row.site for row in rows])
        played = play(urls, specs(rows, args.seed), places=[urls.index(door) for door in doors])
        live = figures(played, float("inf"), float("inf"))
        if live["finished"] < len(rows):
            raise Unreachable(f"{len(rows) - live['finished']} of {len(rows)} requests failed: {live['errors']}")
        live["link_bytes"] = crossed(cluster, sites.names) - before
        there, back = network.link_bytes()
        live["frame_bytes"] = {"east to west": there, "west to east": back}
        if not fits:
            return live, None
        status.update("calibration")
        files = {name: run_dir / f"{name}.steps" for name in sites.names}
        return live, fitted(args, cluster, files, played.outcomes, status.update)


def fitted(
    args: Namespace,
    cluster: LocalCluster,
    files: Mapping[str, Path],
    before: Sequence[Outcome],
    tell: Callable[[str], None],
) -> Nodes:
    """before: the requests so far; their fetches tell the rate of the pool. Raises Unreachable, ValueError, OSError."""
    urls = [node.url for node in cluster.nodes]
    state = rest.get(f"{urls[0]}/debug/state", cluster.api_key)
    config, blocks = state["config"], state["engine"]["blocks"]["total"]
    kv_tokens = blocks * config["block_size"]
    load = specs(replace(load_of(args), requests=args.fit_requests).rows(args.fit_seed), args.fit_seed)
    calibrated = calibrate(urls, files, base_model(args.nodes, config, kv_tokens), load, args.fit_seed, False, tell)
    found = fetches(urls[0], before, config["block_size"], cluster.api_key)
    return Nodes(config, kv_tokens, replace(calibrated, model=found.told(calibrated.model)))


@contextmanager
def key_of_clients() -> Iterator[None]:
    """The clients of the benchmarks send the key of the nodes."""
    before = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = API_KEY
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPENAI_API_KEY"]
        else:
            os.environ["OPENAI_API_KEY"] = before


def show(args: Namespace, found: Sequence[Agreement], nodes: Nodes) -> None:
    console = Console()
    table = Table(
        title=f"{args.requests} requests in each case, {args.delay_ms:g} ms, {args.mbit_s:g} Mbit/s, seed {args.seed}"
    )
    for head in ("", "unit", "live", "simulated", "ratio", "goal", ""):
        table.add_column(head, justify="right" if head in ("live", "simulated", "ratio") else "left")
    for one in found:
        ratio = "none live" if one.ratio is None else f"{one.ratio:.2f}"
        goal, word = ("", "") if one.goal is None else (f"within {one.goal:.0%}", "met" if one.met else "missed")
        values = (f"{value:.4g}" for value in (one.live, one.simulated))
        table.add_row(f"{one.case}: {one.metric}", one.unit, *values, ratio, goal, word)
    console.print(table)
    model = nodes.calibrated.model
    console.print(
        f"way in {1000 * model.front_s:.1f} ms, steps {nodes.calibrated.contention:.1%} longer while another node "
        f"computes, pool {model.nic_bytes_s / 1e9:.2f} GB/s"
    )
    for kind, seen in nodes.calibrated.quality.items():
        console.print(f"fitted to {seen.steps} {kind} steps, off by {seen.error:.1%} on average")


def main(argv: Sequence[str] | None = None) -> int:
    """0 = all goals met, 1 = one is missed, 2 = the measurement failed, UNAVAILABLE = no network namespaces."""
    args = parser().parse_args(argv)
    errors = Console(stderr=True)
    live: dict[str, dict[str, Any]] = {}
    nodes: Nodes | None = None
    try:
        sites, rows = checked(args), load_of(args).rows(args.seed)
        with tempfile.TemporaryDirectory(prefix="validate-sites-") as folder, key_of_clients():
            for number, mode in enumerate(args.modes.split(",")):
                live[mode], told = measured(mode, args, sites, rows, Path(folder) / str(number), nodes is None, errors)
                nodes = nodes or told
        assert nodes is not None, "the first cluster is fitted to"
        ours = {mode: simulated(mode, sites, nodes, rows) for mode in live}
    except NoNamespaces as reason:
        errors.print(f"no network namespaces: {reason}", markup=False)
        return UNAVAILABLE
    except (Unreachable, NodeDied, StartTimeout, OSError, ValueError, UsageError, rest.RestError) as error:
        refuse(errors, "validate-sites", error)
        return 2
    except KeyboardInterrupt:
        return 130
    found = [one for mode in live for one in compared(mode, live[mode], ours[mode])]
    show(args, found, nodes)
    if args.json:
        used = {name: value for name, value in vars(args).items() if name != "json"}
        node = nodes.config | {"record_steps": "NODE.steps"}  # not the temporary path
        about = {"benchmark": "validate-sites", **used, "node": node, "model": asdict(nodes.calibrated.model)}
        about |= {"contention": nodes.calibrated.contention, "fitted_to": nodes.calibrated.quality}
        about |= {"simulator": {mode: config_of(mode, sites, nodes).as_dict() for mode in live}}
        about |= {"rules": {mode: asdict(rules(mode, sites)) for mode in live}, "live": live, "simulated": ours}
        write_result(about, [one.row() for one in found], args.json)
    return 0 if all(one.met for one in found) else 1
