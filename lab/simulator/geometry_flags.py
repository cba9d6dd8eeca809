"""The flags of commands without SimConfig that choose a step model by formula: a published model on given hardware."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace

from cache.groups import PoolRule
from lab.flag_types import positive
from lab.simulator.config import SimConfig
from lab.simulator.models.by_formula import HARDWARE
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


def step_model(args: Namespace) -> StepModel:
    """--model, or --model-geometry on --hardware. Raises ValueError, OSError."""
    return chosen(args.model, args.model_geometry, args.hardware, pool_rule(args))
