"""Hit rates of every eviction and admission policy by capacity, on request traces, with the classes that nodes run.

  scripts/tools.py cache-policies                            # the traces of ../shared/traces, or a generated one
  scripts/tools.py cache-policies --eviction mine.py:Mine --capacities 10000,30000

It prints the BLOCK hit rate: blocks of a prompt's leading cached run over all blocks, for one global cache of 512-token
blocks that is cold at the start. With the released traces, LRU, LFU and FIFO are compared with rates from another
program; a difference above .005 fails. The last table shows what a batch flood costs the chats' hit rate.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cache.pool.admission import Admission, admissions
from cache.pool.admission import choose as choose_admission
from cache.pool.policies import choose, policies
from cache.pool.policy import EvictionPolicy
from lab.bench.common.results import Row, add_result_flags, write_result
from lab.caches.belady import Belady
from lab.caches.replay import replay
from lab.caches.targets import CAPACITIES, CEILINGS, TARGETS, TOLERANCE
from lab.flag_types import natural
from lab.loads.generate import chats, flood
from lab.loads.trace import TraceRow, read_trace
from lab.loads.traces import find_folder

SHARES = {"interactive": 0.9}
FLOOD = 1.0  # batch prompts per request of the trace


def load(args: Namespace) -> dict[str, list[TraceRow]]:
    """Traces by name. Raises OSError, ValueError."""
    directory = Path(args.traces) if args.traces else find_folder()
    files = sorted(directory.glob("*_trace.jsonl*")) if directory is not None else []
    if args.traces is not None and not files:
        raise ValueError(f"--traces {args.traces}: no *_trace.jsonl or *_trace.jsonl.xz in it")
    if not files:
        return {f"generated (seed {args.seed})": chats(args.seed, 4000)}
    return {file.name.partition("_trace")[0]: list(read_trace(file)) for file in files}


def evictions(
    name: str, rows: Sequence[TraceRow], names: Sequence[str], capacities: Sequence[int], step: Callable[[str], None]
) -> list[Row]:
    """One number per policy and capacity, with the ceiling and the reference, if there is one."""
    ceiling = replay(rows, None, choose("lru")).total
    out = []
    for policy in [*names, "belady"]:
        for capacity in capacities:
            made = Belady(rows) if policy == "belady" else choose(policy)
            total = replay(rows, capacity, made).total
            limits = {"ceiling": ceiling.block_rate}
            if (target := reference(name, policy, capacity)) is not None:
                limits["reference"] = target
            note = f"tokens {total.token_rate:.4f}, prefill work {total.work_rate:.4f}"
            case = f"{name} | {policy} | {capacity}"
            out.append(Row(case, "block hit rate", "share", round(total.block_rate, 4), {}, limits, note))
            step(f"{name} {policy} {capacity}")
    return out


def reference(trace: str, policy: str, capacity: int) -> float | None:
    rates = TARGETS.get(trace, {}).get(policy)
    return rates[CAPACITIES.index(capacity)] if rates and capacity in CAPACITIES else None


def admitted(name: str, rows: Sequence[TraceRow], capacities: Sequence[int], step: Callable[[str], None]) -> list[Row]:
    """Rows of LRU with every admission policy."""
    out = []
    for admission in admissions:
        for capacity in capacities:
            end = replay(rows, capacity, choose("lru"), choose_admission(admission))
            note = f"inserted {end.inserted}, refused {end.refused}"
            case = f"{name} | lru + {admission} | {capacity}"
            out.append(Row(case, "block hit rate", "share", round(end.total.block_rate, 4), {}, {}, note))
            step(f"{name} {admission} {capacity}")
    return out


def flooded(name: str, rows: Sequence[TraceRow], capacity: int, step: Callable[[str], None]) -> list[Row]:
    """Chats with and without a batch flood; `ours` is the loss of their block hit rate, in points."""
    both = flood(rows, seed=1, per_request=FLOOD)
    alone = replay(rows, capacity, choose("lru")).total.block_rate
    ways: Mapping[str, tuple[EvictionPolicy, Admission | None]] = {
        "lru, no shares": (choose("lru"), None),
        "s3-fifo, no shares": (choose("s3-fifo"), None),
        "lru, interactive=0.9": (choose("lru", SHARES), None),
        "lru, class-aware": (choose("lru"), choose_admission("class-aware")),
        "lru, interactive=0.9, class-aware": (choose("lru", SHARES), choose_admission("class-aware")),
    }
    out = []
    for way, (policy, admission) in ways.items():
        out.append(_flood_row(f"{name} | flood | {way} | {capacity}", alone, both, capacity, policy, admission))
        step(f"{name} flood {way}")
    return out


def _flood_row(
    case: str,
    alone: float,
    both: Sequence[TraceRow],
    capacity: int,
    policy: EvictionPolicy,
    admission: Admission | None,
) -> Row:
    end = replay(both, capacity, policy, admission).by_class
    chat, batch = end["interactive"].block_rate, end["batch"].block_rate
    note = f"chats alone {alone:.4f}, flooded {chat:.4f}; batch {batch:.4f}"
    return Row(case, "chat hit rate lost", "points", round(100 * (alone - chat), 2), {}, {}, note)


def measured(traces: Mapping[str, list[TraceRow]], names: Sequence[str], capacities: Sequence[int]) -> list[Row]:
    """All tables of all traces."""
    per_trace = (len(names) + 1 + len(admissions)) * len(capacities) + 5
    found: list[Row] = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=per_trace * len(traces))

        def step(label: str) -> None:
            bar.update(task, description=label, advance=1)

        for name, rows in traces.items():
            found += evictions(name, rows, names, capacities, step)
            found += admitted(name, rows, capacities, step)
            found += flooded(name, rows, sorted(capacities)[len(capacities) // 2], step)
    return found


def print_tables(rows: Sequence[Row], capacities: Sequence[int]) -> None:
    """One line per policy, one column per capacity."""
    grids: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        *head, capacity = row.case.split(" | ")
        grids.setdefault((head[0], " | ".join(head[1:])), {})[int(capacity)] = row
    title = ""
    for (trace, policy), cells in grids.items():
        kind = f"{trace}: " + next(iter(cells.values())).metric
        if kind != title:
            title = kind
            print(f"\n{kind:<48}" + "".join(f"{capacity:>9}" for capacity in capacities))
        line = "".join(f"{cells[c].ours:>9.3f}" if c in cells else " " * 9 for c in capacities)
        print(f"  {policy:<46}{line}")


def differences(rows: Sequence[Row]) -> list[float]:
    """The distance from the reference, for every rate that it has."""
    known = [(row.ours, row.limits["reference"]) for row in rows if "reference" in row.limits]
    return [abs(ours - reference) for ours, reference in known if ours is not None]


def disagreements(rows: Sequence[Row]) -> list[str]:
    """The rates that differ from the reference by more than its tolerance."""
    out = []
    for row in rows:
        target = row.limits.get("reference")
        if target is not None and row.ours is not None and abs(row.ours - target) > TOLERANCE:
            out.append(f"{row.case}: {row.ours:.4f}, the reference says {target:.3f}")
        trace = row.case.partition(" | ")[0]
        if trace in CEILINGS and "ceiling" in row.limits and abs(row.limits["ceiling"] - CEILINGS[trace]) > TOLERANCE:
            out.append(f"{row.case}: ceiling {row.limits['ceiling']:.4f}, the reference says {CEILINGS[trace]:.3f}")
    return out


def parser() -> ArgumentParser:
    out = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    out.add_argument("--traces", metavar="DIR", help="directory of *_trace.jsonl[.xz] (default: ../shared/traces)")
    out.add_argument("--seed", type=natural, default=0, help="seed of the generated trace (default %(default)s)")
    out.add_argument("--eviction", default=",".join(policies), help="policies, joined by commas; also FILE.py:NAME")
    out.add_argument("--capacities", help="blocks, joined by commas (default: 100000 to 1000)")
    add_result_flags(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        capacities = [int(c) for c in args.capacities.split(",")] if args.capacities else list(CAPACITIES)
        names = args.eviction.split(",")
        for name in names:
            choose(name)
        traces = load(args)
    except (OSError, ValueError) as error:
        print(f"cache_policies: {error}", file=sys.stderr)
        return 2
    if args.quick:
        capacities, traces = capacities[-2:], {name: rows[:2000] for name, rows in traces.items()}
    found = measured({f"first {len(r)} of {n}" if args.quick else n: r for n, r in traces.items()}, names, capacities)
    print_tables(found, capacities)
    if args.json is not None:
        config = {"traces": {n: len(r) for n, r in traces.items()}, "capacities": capacities, "seed": args.seed}
        write_result(config, found, args.json)
    wrong = disagreements(found)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0
