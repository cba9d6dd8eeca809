"""Copies of experts against failures of ranks: tokens per second of a node with one, two or more of each expert.

  scripts/plan.py expert-failures                                          # Kimi-K2 on 16 H200
  scripts/plan.py expert-failures --hardware 32xh20 --expert-ranks 32 --between-hours 1 24 720

Decoding only, by formula: lab/simulator/models/expert_ranks.py has the steps, lab/formulas/expert_failures.py the
failures. A rank is back after --start-s and the load of its share at --load-gbyte-s.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from lab.bench.common.results import Row, write_result
from lab.flag_types import above_zero, file_to_write, positive
from lab.formulas.expert_failures import Decoding, Failures, goodput, tokens_s
from lab.formulas.roofs import decode_batch
from lab.geometry.architecture import Weights
from lab.geometry.find import architecture
from lab.one_line import refuse
from lab.simulator.geometry_flags import add_expert_flags, add_geometry_flags, expert_ranks, step_model
from lab.simulator.models.expert_ranks import ExpertRanks
from lab.simulator.models.step_models import StepModel

HOUR_S = 3600.0


def parser() -> ArgumentParser:
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_geometry_flags(made)
    add_expert_flags(made)
    made.set_defaults(model="", model_geometry="Kimi-K2", hardware="16xh200", expert_ranks=16)
    made.add_argument("--copies", type=positive, nargs="+", default=[1, 2], help="of each expert (default: 1 2)")
    hours = [1.0, 24.0, 720.0]
    made.add_argument(
        "--between-hours", type=above_zero, nargs="+", default=hours, help="between two failures of a rank"
    )
    made.add_argument("--start-s", type=above_zero, default=30.0, help="until a new process loads (default: 30)")
    made.add_argument("--load-gbyte-s", type=above_zero, default=5.0, help="of a rank's share (default: 5)")
    made.add_argument("--context", type=positive, default=8000, help="tokens of a request (default: 8,000)")
    made.add_argument("--answer", type=positive, default=500, help="tokens of an answer (default: 500)")
    made.add_argument("--max-batch", type=positive, default=4096, help="requests that decode together (default: 4,096)")
    made.add_argument("--tbt-s", type=above_zero, default=0.05, help="limit between tokens (default: 0.05)")
    made.add_argument("--json", type=file_to_write, metavar="FILE", help="write the figures and the configuration")
    return made


def back_s(args: Namespace, weights: Weights, given: ExpertRanks) -> float:
    """Until a new process of a rank answers: its start, and the load of its share."""
    share = given.copies * weights.experts * weights.expert_bytes / given.ranks
    share += (weights.shared + weights.embedding) * weights.shared_bytes  # whole on each rank
    return float(args.start_s + share / (1e9 * args.load_gbyte_s))


def rows_of(args: Namespace) -> list[Row]:
    """Raises ValueError, OSError."""
    weights, wanted = architecture(args.model_geometry).weights, Decoding(args.context, args.answer, args.tbt_s)
    base, rows = expert_ranks(args), list[Row]()
    if base is None:
        raise ValueError("--expert-ranks 0: give the number of ranks")
    for copies in args.copies:
        given = replace(base, copies=copies)
        whole = _model(args, given)
        less = _model(args, replace(given, masked=1)) if copies > 1 else None
        case = f"copies={copies}"
        rows.append(Row(case, "no failures", "tokens/s", tokens_s(whole, wanted)))
        rows.append(Row(case, "batch", "", float(decode_batch(whole, wanted.context, wanted.tbt_s))))
        for hours in args.between_hours:
            failures = Failures(HOUR_S * hours, back_s(args, weights, given))
            found = goodput(whole, less, given.ranks, failures, wanted)
            rows.append(Row(case, f"a failure per rank in {hours:g} h", "tokens/s", found))
    return rows


def _model(args: Namespace, given: ExpertRanks) -> StepModel:
    return replace(step_model(args, given), max_batch=args.max_batch)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        rows = rows_of(args)
    except (OSError, ValueError) as error:
        refuse(Console(stderr=True), "expert-failures", error)
        return 2
    table = Table(title=f"{args.model_geometry} on {args.hardware}, {args.expert_ranks} ranks: decoding, by formula")
    for name in ("copies", "", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.case.removeprefix("copies="), row.metric, f"{row.ours:,.0f}")
    Console().print(table)
    if args.json:
        write_result({key: value for key, value in vars(args).items() if key != "json"}, rows, args.json)
    return 0
