"""The flags of commands without SimConfig that choose a step model by formula: a published model on given hardware."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace

from cache.groups import PoolRule
from lab.flag_types import above_zero, natural, positive
from lab.simulator.config import SimConfig
from lab.simulator.models.by_formula import HARDWARE
from lab.simulator.models.expert_ranks import ExpertRanks
from lab.simulator.models.presets import chosen
from lab.simulator.models.step_models import StepModel

DEFAULT = SimConfig()


def add_geometry_flags(made: ArgumentParser) -> None:
    group = made.add_argument_group("step times by formula, from the groups of a model's KV")
    group.add_argument(
        "--model-geometry", default="", metavar="NAME", help="a published model (kv-bytes lists them) or a directory"
    )
    group.add_argument("--hardware", choices=tuple(HARDWARE), default=DEFAULT.hardware, help="of a node")
    add_pool_flags(made, DEFAULT.block_tokens, DEFAULT.state_every)


def add_pool_flags(made: ArgumentParser, block_tokens: int, state_every: int) -> None:
    """The windows and states that the pool keeps."""
    made.add_argument(
        "--pool-windows", action=BooleanOptionalAction, default=True, help="pool blocks of layers with a window"
    )
    told = f"blocks of {block_tokens} tokens from one pooled state to the next (default: {state_every})"
    made.add_argument("--state-every", type=positive, default=state_every, metavar="N", help=told)


def pool_rule(args: Namespace) -> PoolRule:
    """Raises ValueError."""
    return PoolRule(args.pool_windows, args.state_every)


def add_expert_flags(made: ArgumentParser) -> None:
    """How the GPUs of a node share the experts."""
    group = made.add_argument_group("ranks with experts (lab/simulator/models/expert_ranks.py)")
    group.add_argument(
        "--expert-ranks", type=natural, default=0, metavar="W", help="GPUs of a node; 0 = even load, at no cost"
    )
    group.add_argument("--expert-copies", type=positive, default=1, metavar="C", help="of each expert (default: 1)")
    group.add_argument(
        "--expert-imbalance", type=above_zero, default=1.2, help="load of the busiest rank by the mean (default: 1.2)"
    )
    group.add_argument(
        "--expert-link-gbit-s", type=above_zero, default=400.0, help="of a rank to the others (default: 400)"
    )
    group.add_argument("--masked-ranks", type=natural, default=0, metavar="M", help="ranks that are lost (default: 0)")


def expert_ranks(args: Namespace) -> ExpertRanks | None:
    """None without --expert-ranks. Raises ValueError."""
    if not args.expert_ranks:
        return None
    link = 1e9 * args.expert_link_gbit_s / 8
    if args.masked_ranks and args.expert_copies < 2:
        raise ValueError(f"--masked-ranks {args.masked_ranks}: a node with one copy of each expert does not serve then")
    return ExpertRanks(args.expert_ranks, args.expert_copies, args.expert_imbalance, link, args.masked_ranks)


def step_model(args: Namespace, ranks: ExpertRanks | None = None) -> StepModel:
    """--model, or --model-geometry on --hardware, with experts on `ranks`. Raises ValueError, OSError."""
    return chosen(args.model, args.model_geometry, args.hardware, pool_rule(args), ranks)
