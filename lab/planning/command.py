"""The smallest cluster for a load and its objectives, by formula: the number of prefill and decode nodes, and its cost.

  scripts/tools.py plan                                                   # the conversation trace at its own rate
  scripts/tools.py plan --rate 12 --pool-blocks 50000 --ttft-s 10 --tbt-s 0.1
  scripts/tools.py plan --prompt 4000,1.5 --answer 300,1 --rate 20 --hit-rate 0.4 --model llama3-8b-h200
  scripts/tools.py plan --model-geometry Kimi-K2 --hardware 16xh200 --rate 40
  scripts/tools.py plan --model-geometry Kimi-K2 --hardware 32xh20 --expert-ranks 32 --expert-copies 2 --rate 10
  scripts/tools.py plan --prefill-cost 16 --decode-cost 16                # per node and hour; cost per million tokens

Prompts and answers come from a trace, with the prefixes that an LRU pool of --pool-blocks finds or --hit-rate of every
prompt, or are lognormal by mean and coefficient of variation. `scripts/tools.py check-plan` compares plans with the
simulator.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.bench.common.results import numbers, write_result
from lab.flag_types import above_zero, file_to_write, natural, not_negative, part, positive, share
from lab.formulas.loads import drawn, load_of
from lab.formulas.plan import Infeasible, Load, Objective, Plan, plan
from lab.loads.generate import chats
from lab.loads.trace import TraceRow, read_trace
from lab.loads.traces import find_trace
from lab.one_line import refuse
from lab.simulator.geometry_flags import add_expert_flags, add_geometry_flags, expert_ranks, step_model

SPLITS_SHOWN = 8  # splits of the Pareto front


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--trace", metavar="FILE", help="requests in Mooncake's format, .jsonl or .jsonl.xz")
    made.add_argument("--prompt", type=pair, metavar="MEAN,CV", help="lognormal prompts instead of a trace, tokens")
    made.add_argument("--answer", type=pair, metavar="MEAN,CV", default=(300.0, 1.0), help="and their answers")
    made.add_argument("--rate", type=not_negative, default=0.0, help="requests per second (default: the trace's)")
    made.add_argument("--hit-rate", type=share, default=0.0, help="share of every prompt that is cached")
    made.add_argument(
        "--pool-blocks", type=positive, metavar="N", help="find prefixes by replay through a pool of N blocks"
    )
    made.add_argument("--model", default="llama3-70b-8xa800", help="step times of a node: a preset, or FILE.json")
    add_geometry_flags(made)
    add_expert_flags(made)
    made.add_argument("--ttft-s", type=above_zero, default=30.0, help="objective for the first token (default: 30)")
    made.add_argument("--tbt-s", type=above_zero, default=0.1, help="objective between tokens, a request's mean")
    made.add_argument("--share", type=part, default=0.9, help="share of requests that must meet both (default: 0.9)")
    made.add_argument("--prefill-cost", type=not_negative, default=1.0, help="cost per node and hour (default: 1)")
    made.add_argument("--decode-cost", type=not_negative, default=1.0, help="cost per node and hour (default: 1)")
    made.add_argument("--seed", type=natural, default=0, help="seed of drawn lengths")
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write the plan and the whole configuration")
    return made


def pair(text: str) -> tuple[float, float]:
    """MEAN,CV. Raises ValueError."""
    mean, variation = (float(part) for part in text.split(","))
    if not (1 <= mean < math.inf and 0 <= variation < math.inf):
        raise ValueError(text)
    return mean, variation


def load(args: Namespace) -> tuple[str, Load]:
    """(origin of the requests, the load). Raises OSError, ValueError."""
    if args.hit_rate and args.pool_blocks:
        raise ValueError("--hit-rate says what is found and --pool-blocks finds it: give one of the two")
    name, rows = _rows(args)
    return name, load_of(rows, args.rate, args.pool_blocks, args.hit_rate)


def _rows(args: Namespace) -> tuple[str, list[TraceRow]]:
    if args.prompt:
        if not args.rate > 0:
            raise ValueError("--prompt needs --rate")
        if args.trace:
            raise ValueError("--prompt draws the requests and --trace reads them: give one of the two")
        return "lognormal lengths", drawn(args.seed, 4000, args.prompt, args.answer, args.rate)
    path = Path(args.trace) if args.trace else find_trace("conversation")
    if path is None:
        return "generated chats", chats(args.seed, 4000)
    try:
        return path.name, sorted(read_trace(path), key=lambda row: row.timestamp_ms)  # a pool sees them in this order
    except (OSError, ValueError) as error:
        raise ValueError(f"--trace {path}: {error}") from None


def shown(found: Plan, priced: bool) -> Table:
    made = Table(title="splits that meet the objectives; no other split is both cheaper and faster")
    for name in ("prefill", "decode", "TTFT, s", "between tokens, ms", "cost per hour" if priced else "nodes"):
        made.add_column(name, justify="right")
    for one in found.front[:SPLITS_SHOWN]:
        made.add_row(
            str(one.prefill), str(one.decode), f"{one.ttft_s:.3g}", f"{1000 * one.tbt_s:.3g}", f"{one.cost:.4g}"
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console()
    try:
        name, wanted = load(args)
        objective = Objective(args.ttft_s, args.tbt_s, args.share)
        console.print(
            f"{name}: {wanted.rate:.3g} requests/s, {wanted.prompt.mean():.0f} tokens in, {wanted.answer.mean():.0f} "
            f"out, {wanted.hit_rate:.1%} of the prompt tokens found"
        )
        found = plan(step_model(args, expert_ranks(args)), wanted, objective, args.prefill_cost, args.decode_cost)
    except Infeasible as why:
        console.print(str(why), style="red")
        return 1
    except (OSError, ValueError) as error:
        refuse(Console(stderr=True), "plan", error)
        return 2
    best = found.best
    console.print(
        f"{best.prefill} prefill and {best.decode} decode nodes; prefill busy {found.prefill_busy:.0%}, "
        f"{found.batch:.1f} requests decoded together per node"
    )
    console.print(
        f"cost {best.cost:.4g} per hour: {found.per_million_output:.4g} per million tokens of answers, "
        f"{found.per_million_tokens:.4g} per million of both"
    )
    if found.prefill_busy > 0.9:
        console.print("prefill is over 90 % busy: the formula is up to 27 % off there; simulate before you buy")
    console.print(shown(found, args.prefill_cost != 1.0 or args.decode_cost != 1.0))
    if args.json:
        config = {key: value for key, value in vars(args).items() if key != "json"} | {"requests": name}
        write_result(config | {"plan": asdict(found)}, numbers(name, asdict(found)), args.json)
    return 0
