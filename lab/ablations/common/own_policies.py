"""The user's policies in an ablation: one more case, its last one with them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

from lab.ablations.common.ablation import Ablation, Case
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig

FIELDS = ("placement", "eviction", "cache_admission", "queue_order", "batching_policy", "rejection")
"""Of SimConfig; the flags have the names of a node's."""


def add_flags(made: ArgumentParser) -> None:
    group = made.add_argument_group("policies of your own", "add a case: the last one of the ablation with them")
    for name in FIELDS:
        group.add_argument(f"--{name.replace('_', '-')}", metavar="FILE.py:NAME", help="or a built-in name")


def with_own(ablation: Ablation[Any], args: Namespace) -> Ablation[Any]:
    """The ablation with one more case, if there is any of the flags. Without clusters its `cases` raise ValueError."""
    changes = named(args)

    def cases(requests: int | None) -> list[Any]:
        known = ablation.cases(requests)
        if not isinstance(known[-1], Case):
            raise ValueError(f"{ablation.name} takes no policies of your own: it simulates no cluster")
        label = ", ".join([known[-1].label, *changes.values()])
        return [*known, replace(known[-1], label=label, config=replace(known[-1].config, **changes))]

    return replace(ablation, cases=cases) if changes else ablation


def check(args: Namespace) -> None:
    """Whether there are such policies, before the first case runs. Raises OSError, ValueError naming the flag."""
    Cluster(replace(SimConfig(prefill=1, decode=1), **named(args)))


def named(args: Namespace) -> dict[str, Any]:
    """The flags that are given, by field."""
    return {name: value for name in FIELDS if (value := getattr(args, name)) is not None}
