"""Step models by name, from a file, or by formula: the values of --model and --model-geometry."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import orjson

from cache.groups import PoolRule
from lab.geometry.find import architecture
from lab.simulator.models.by_formula import by_formula
from lab.simulator.models.expert_ranks import ExpertRanks
from lab.simulator.models.step_models import PRESETS, StepModel


def chosen(model: str, geometry: str, hardware: str, rule: PoolRule, ranks: ExpertRanks | None = None) -> StepModel:
    """`geometry` on `hardware` by formula, with its experts on `ranks`; without it, the preset `model`. Raises
    ValueError, OSError."""
    if ranks is not None and not geometry:
        raise ValueError("--expert-ranks needs --model-geometry: the steps of a preset do not tell what is experts'")
    if not geometry:
        return preset(model)
    try:
        found = architecture(geometry)
    except ValueError as error:
        raise ValueError(f"--model-geometry: {error}") from error
    return by_formula(found, hardware, rule, ranks)


def preset(name: str) -> StepModel:
    """A name of PRESETS, or the path of a .json file. Raises ValueError naming --model, OSError."""
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith(".json"):
        raise ValueError(f"--model: {name!r} is neither a .json file nor one of {', '.join(PRESETS)}")
    try:
        return _model(orjson.loads(Path(name).read_bytes())["model"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"--model: {name} is no step model: {error!r}; scripts/tools.py validate writes one"
        ) from error


def write_preset(path: Path, model: StepModel, origin: dict[str, Any]) -> None:
    """`origin`: the source of the numbers, for readers."""
    data = {"model": asdict(model), "origin": origin}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def _model(data: dict[str, Any]) -> StepModel:
    known = {field.name for field in fields(StepModel)}
    if unknown := set(data) - known:
        raise KeyError(sorted(unknown)[0])
    if data.get("kv") is not None:
        raise TypeError("kv must be null: groups are read with --model-geometry")
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    for name, size in (("prefill", 3), ("decode", 5), ("mixed", 5)):
        values = made.get(name)
        if (values is not None or name != "mixed") and not (isinstance(values, tuple) and len(values) == size):
            raise TypeError(f"{name} must have {size} numbers")
    return StepModel(**made)
