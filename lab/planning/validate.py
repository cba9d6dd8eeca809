"""The simulator against real nodes: a step model is fitted to recorded steps, then both get the same requests.

  scripts/tools.py validate --nodes mixed=1                      # one node on one core, the client on another
  scripts/tools.py validate --nodes prefill=1,decode=1           # one core each, which the client shares
  scripts/tools.py validate --nodes prefill=1,decode=1,store=1 --store-dram-mb 128 --store-ssd-mb 512 -- \\
      --kv-cache-bytes 60M                                       # prefixes from the DRAM and the SSD of a store
  scripts/tools.py validate --preset cpu.json --json out.json && scripts/simulate.py --model cpu.json --mixed 2
  scripts/tools.py validate --trace mine.jsonl --rate 2          # a recorded trace, an eighth of its lengths

The command starts nodes of the embedded model, each on its own core, which record their steps (--record-steps). They
first get requests of many sizes and an open-loop part with --fit-seed: lab/simulator/models/fit.py fits a step model to
the steps, and the command also fits the way in, the hand-over, and the contention of nodes on one machine. Then
--seconds of open-loop requests with --seed run live and simulated. With a store, prefixes from it are simulated too,
with the rates of DRAM and SSD that the fetches in the part for the fit had. Exit code 1 if a goal is missed: mean time
per output token within 5 %, mean time to first token within 10 %, its p99 within 20 %.
"""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.config.flags import UsageError
from lab.ablations.live.calibrate import Calibrated, calibrate, recorded
from lab.ablations.live.fetches import Fetches, fetches
from lab.ablations.live.loads import Shape, requests, scaled, specs
from lab.ablations.live.play import doors, figures, pinned, play
from lab.ablations.live.shares import CpuShares, Watch
from lab.ablations.live.twin import base_model, simulate, twin
from lab.bench.common.client import Unreachable
from lab.bench.common.machine import machine
from lab.bench.common.results import commit, write_result
from lab.flag_types import above_zero, file_to_write, natural, positive, share
from lab.launch import rest
from lab.launch.cluster import LocalCluster, NodeDied, StartTimeout
from lab.launch.nodes import parse_nodes
from lab.loads.trace import TraceRow, read_trace
from lab.one_line import refuse
from lab.planning.command import pair
from lab.simulator.config import SimConfig
from lab.simulator.models.fit import quality
from lab.simulator.models.presets import write_preset
from lab.simulator.models.step_models import StepModel

METRICS = (
    ("TPOT mean", "tbt_s", "mean", 0.05),
    ("TPOT p50", "tbt_s", "p50", None),
    ("TTFT mean", "ttft_s", "mean", 0.10),
    ("TTFT p50", "ttft_s", "p50", None),
    ("TTFT p99", "ttft_s", "p99", 0.20),
    ("longest gap mean", "longest_gap_s", "mean", None),
)
"""(label, figure, part, maximum error)"""
IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric, milliseconds."""

    metric: str
    live_ms: float
    simulated_ms: float
    steps_only_ms: float  # simulated without way in, hand-over and contention
    error: float  # simulated / live - 1
    goal: float | None

    @property
    def met(self) -> bool:
        return self.goal is None or abs(self.error) <= self.goal

    def row(self, case: str) -> dict[str, Any]:
        here = {"case": case, "unit": "ms", "ours": self.simulated_ms, "peers": {"live": self.live_ms}}
        return here | asdict(self) | {"met": self.met}


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of the live part."""

    calibrated: Calibrated
    held_out: dict[str, Any]  # quality on the steps of the measured requests
    live: dict[str, Any]
    config: dict[str, Any]  # resolved Config of a node
    kv_tokens: int
    idle: CpuShares
    loaded: CpuShares
    store: dict[str, Any] | None = None  # resolved Config of a node that is only a store
    tiers: dict[str, Any] | None = None  # and what it says of its tiers
    fitted_fetches: Fetches | None = None  # in the part for the fit
    fetches: Fetches | None = None  # in the measured part


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    made.add_argument("--nodes", default="mixed=1", help="nodes to start (default %(default)s)")
    made.add_argument("--rate", type=above_zero, default=1.0, help="requests per second (default %(default)s)")
    made.add_argument(
        "--seconds", type=above_zero, default=100.0, help="seconds of measured requests (default %(default)s)"
    )
    made.add_argument("--fit-seconds", type=above_zero, default=40.0, help="the same for the fit (default %(default)s)")
    made.add_argument("--seed", type=natural, default=1, help="seed of the measured requests (default %(default)s)")
    made.add_argument(
        "--fit-seed", type=natural, default=2, help="seed of the requests for the fit (default %(default)s)"
    )
    made.add_argument("--prompt", type=pair, default=(500.0, 0.8), metavar="MEAN,CV", help="lognormal prompts, tokens")
    made.add_argument("--answer", type=pair, default=(32.0, 0.5), metavar="MEAN,CV", help="and answers")
    made.add_argument("--shared", type=share, default=0.5, help="share of requests that begin with one of 8 prefixes")
    made.add_argument(
        "--store-dram-mb", type=positive, metavar="MB", help="DRAM of each node with the role store alone"
    )
    made.add_argument("--store-ssd-mb", type=positive, metavar="MB", help="its SSD, in a temporary folder")
    made.add_argument("--trace", type=Path, metavar="FILE", help="take lengths, prefixes and order from a trace")
    made.add_argument(
        "--preset", type=file_to_write, metavar="FILE", help="write the fitted model for --model of the simulator"
    )
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write all measurements")
    made.add_argument("node_flags", nargs="*", metavar="-- FLAG", help="more flags of every node, after --")
    return made


def rows_of(args: Namespace, seed: int, seconds: float) -> list[TraceRow]:
    """Requests of a part. The measured part of a trace is from its first half and the part for the fit from its second
    one, so that no request is in both. Raises ValueError."""
    if args.trace is None:
        shape = Shape(args.prompt, args.answer, args.shared, rate=args.rate)
        return requests(shape, seed, seconds)
    try:
        rows = sorted(read_trace(args.trace), key=lambda row: row.timestamp_ms)
        half = len(rows) // 2
        return scaled(rows[:half] if seed == args.seed else rows[half:], args.rate, seconds)
    except (OSError, ValueError) as error:
        raise ValueError(f"--trace {args.trace}: {error}") from None


def measure(args: Namespace, cluster: LocalCluster, run_dir: Path, rows: list[TraceRow], console: Console) -> Measured:
    """Raises Unreachable, ValueError, OSError."""
    urls, pids = doors(cluster), {node.name: node.pid for node in cluster.nodes}
    files = {node.name: run_dir / f"{node.name}.steps" for node in cluster.nodes if node.role != "store"}
    state = rest.get(f"{urls[0]}/debug/state")
    config, kv_tokens = state["config"], state["engine"]["blocks"]["total"] * state["config"]["block_size"]
    watch = Watch(pids)
    time.sleep(IDLE_S)
    idle = watch.end()
    fit_load = specs(rows_of(args, args.fit_seed, args.fit_seconds), args.fit_seed)
    base = base_model(args.nodes, config, kv_tokens)
    apart = {"prefill", "decode"} <= {node.role for node in cluster.nodes}
    with console.status("calibration") as status:
        calibrated = calibrate(urls, files, base, fit_load, args.fit_seed, apart, status.update)
        since = time.monotonic()
        status.update(f"{len(rows)} requests in {args.seconds:g} s")
        watch = Watch(pids)
        played = play(urls, specs(rows, args.seed))
        loaded = watch.end()
    live = figures(played, float("inf"), float("inf"))
    if live["finished"] < len(rows):
        raise Unreachable(f"{len(rows) - live['finished']} of {len(rows)} requests failed: {live['errors']}")
    steps = [step for step in recorded(files) if step.begin > since]
    found = quality(calibrated.model, calibrated.contention, steps)
    stores = [node.url for node in cluster.nodes if node.role == "store"]
    if not stores:
        return Measured(calibrated, found, live, config, kv_tokens, idle, loaded)
    store = rest.get(f"{stores[0]}/debug/state")
    before, now = (fetches(urls[0], part, config["block_size"]) for part in (calibrated.load, played.outcomes))
    calibrated = replace(calibrated, model=before.told(calibrated.model))
    seen = store["config"], store["store"], before, now
    return Measured(calibrated, found, live, config, kv_tokens, idle, loaded, *seen)


def compare(
    live: dict[str, Any], config: SimConfig, model: StepModel, rows: Sequence[TraceRow]
) -> tuple[list[Compared], dict[str, Any]]:
    """Returns the rows of the table and the simulated figures. Raises ValueError for a metric that no request has."""
    simulated, _ = simulate(config, model, rows)
    for name, figure, *_ in METRICS:
        if live[figure] is None or simulated[figure] is None:
            raise ValueError(f"no request has a {name}, so nothing is validated: answers need two tokens, see --answer")
    bare, _ = simulate(replace(config, contention=0.0), replace(model, front_s=0.0, handover_s=0.0), rows)
    made = []
    for name, figure, part, goal in METRICS:
        ours, theirs, less = (1000 * result[figure][part] for result in (live, simulated, bare))
        made.append(Compared(name, ours, theirs, less, theirs / ours - 1, goal))
    return made, simulated


def show(args: Namespace, measured: Measured, compared: Sequence[Compared], simulated: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"{args.nodes}: {measured.live['requests']} requests, seed {args.seed}")
    for head in ("", "live, ms", "simulated, ms", "steps alone, ms", "error", "goal", ""):
        table.add_column(head, justify="right")
    for one in compared:
        goal, word = ("", "") if one.goal is None else (f"{one.goal:.0%}", "met" if one.met else "missed")
        cells = (f"{value:.1f}" for value in (one.live_ms, one.simulated_ms, one.steps_only_ms))
        table.add_row(one.metric, *cells, f"{one.error:+.1%}", goal, word)
    console.print(table)
    for title, found in (("fitted to", measured.calibrated.quality), ("measured part", measured.held_out)):
        for kind, seen in found.items():
            console.print(
                f"{title}: {seen.steps} {kind} steps, off by {seen.error:.1%} on average, {seen.bias:+.1%} in total"
            )
    if measured.fetches is not None:
        _show_fetches(console, measured, simulated)
    model, idle, loaded = measured.calibrated.model, measured.idle, measured.loaded
    console.print(
        f"way in {1000 * model.front_s:.1f} ms, hand-over {1000 * model.handover_s:.1f} ms, steps "
        f"{measured.calibrated.contention:.1%} longer while another node computes; found prefixes "
        f"{measured.live['token_hit_rate']:.1%} live, {simulated['token_hit_rate']:.1%} simulated"
    )
    loops = ", ".join(f"{name} {idle.loops[name]:.1%} / {loaded.loops[name]:.1%}" for name in idle.loops)
    console.print(
        f"cores: client {loaded.client:.1%}, other programs {loaded.elsewhere:.1%}; event loops of nodes, idle "
        f"(gossip) / loaded (+ HTTP): {loops}"
    )


def _show_fetches(console: Console, measured: Measured, simulated: dict[str, Any]) -> None:
    found, model, store = measured.fetches, measured.calibrated.model, measured.store
    assert found is not None and store is not None
    console.print(
        f"prefixes from the store: {found.dram_tokens} tokens from DRAM and {found.ssd_tokens} from SSD live, "
        f"{simulated['fetched_tokens'] - simulated['ssd_tokens']} and {simulated['ssd_tokens']} simulated; fitted "
        f"rates {model.nic_bytes_s / 1e9:.2f} and {model.ssd_bytes_s / 1e9:.2f} GB/s"
    )
    empty = [] if found.dram_tokens else ["DRAM"]
    empty += ["SSD"] if store["ssd_path"] is not None and not found.ssd_tokens else []
    if empty:
        console.print(
            f"no prefix came from {' or '.join(empty)} live, so nothing is validated there: change --store-dram-mb, "
            "--shared or the nodes' --kv-cache-bytes",
            style="yellow",
        )


def store_flags(args: Namespace, folder: Path) -> dict[str, list[str]]:
    """More flags of the nodes that are only a store. Raises ValueError."""
    given = args.store_dram_mb is not None or args.store_ssd_mb is not None
    if given and not any(role == "store" for _, role in parse_nodes(args.nodes)):
        raise ValueError(f"--store-dram-mb and --store-ssd-mb are for a node with the role store; --nodes {args.nodes}")
    made = [] if args.store_dram_mb is None else ["--dram-bytes", f"{args.store_dram_mb}M"]
    if args.store_ssd_mb is not None:
        made += ["--ssd-path", f"{folder}/ssd-{{node}}", "--ssd-bytes", f"{args.store_ssd_mb}M"]
    return {"store": made}


def main(argv: Sequence[str] | None = None) -> int:
    """0 = all goals met, 1 = one is missed, 2 = the measurement failed."""
    args = parser().parse_args(argv)
    errors = Console(stderr=True)
    try:
        if args.seed == args.fit_seed:
            raise ValueError("--seed and --fit-seed must differ: a model reproduces the data it was fitted to")
        rows = rows_of(args, args.seed, args.seconds)
        rows_of(args, args.fit_seed, args.fit_seconds)  # what is wrong with it must be told before nodes start
        with tempfile.TemporaryDirectory(prefix="validate-") as folder:
            run_dir = Path(folder) / "nodes"
            flags = ("--record-steps", f"{run_dir}/{{node}}.steps", *args.node_flags)
            with pinned(args.nodes, flags, run_dir, store_flags(args, Path(folder))) as cluster:
                measured = measure(args, cluster, run_dir, rows, errors)
        model = measured.calibrated.model
        contention = measured.calibrated.contention
        config = twin(args.nodes, measured.config, measured.kv_tokens, contention, measured.tiers)
        compared, simulated = compare(measured.live, config, model, rows)
    except (Unreachable, NodeDied, StartTimeout, OSError, ValueError, UsageError, rest.RestError) as error:
        refuse(errors, "validate", error)
        return 2
    except KeyboardInterrupt:
        return 130
    show(args, measured, compared, simulated)
    written = ("json", "preset")
    used = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in written}
    if args.preset:
        write_preset(args.preset, model, {"commit": commit(), "machine": machine(), "flags": used})
        print(f"written: {args.preset}")
    if args.json:
        node = measured.config | {"record_steps": "NODE.steps"}  # not the temporary path
        told = {"benchmark": "validate", **used, "node": node, "simulator": config.as_dict()}
        told |= {
            "contention": measured.calibrated.contention,
            "model": asdict(model),
            "live": measured.live,
            "simulated": simulated,
        }
        told |= {"fitted_to": measured.calibrated.quality, "held_out": measured.held_out}
        if measured.fetches is not None and measured.fitted_fetches is not None and measured.store is not None:
            kept = {name: measured.store[name] for name in ("dram_bytes", "ssd_bytes", "ssd_backend", "eviction")}
            told["fetches"] = {
                "fitted": asdict(measured.fitted_fetches), "live": asdict(measured.fetches), "store": kept,
            }  # fmt: skip
        told |= {"cores_idle": asdict(measured.idle), "cores_loaded": asdict(measured.loaded)}
        write_result(told, [one.row(args.nodes) for one in compared], args.json)
    return 0 if all(one.met for one in compared) else 1
