"""An ablation whose nodes run another model: its step times by formula, its KV in groups (--model-geometry)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lab.ablations.common.ablation import Ablation, Case


def with_geometry(
    ablation: Ablation[Any], geometry: str, hardware: str, pool_windows: bool, state_every: int
) -> Ablation[Any]:
    """The same cases with this model, without the paper's values and without goals, which are about another one. Its
    `cases` raise ValueError if the ablation chooses models itself."""

    def cases(requests: int | None) -> list[Any]:
        made = ablation.cases(requests)
        if any(not isinstance(c, Case) or c.model is not None or c.config.model_geometry for c in made):
            raise ValueError(f"{ablation.name} chooses its models itself: it takes no --model-geometry")
        return [
            replace(
                case,
                config=replace(
                    case.config,
                    model_geometry=geometry,
                    hardware=hardware,
                    pool_windows=pool_windows,
                    state_every=state_every,
                ),
            )
            for case in made
        ]

    told = f"{geometry} on {hardware}, by formula: values of the paper in the text below are of another model."
    return replace(
        ablation, cases=cases, definition=f"{ablation.definition} {told}", paper={}, paper_source="", goals=None
    )
