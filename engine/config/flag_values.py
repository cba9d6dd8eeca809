"""One field of Config as text: its flag's name, and how its value is parsed and formatted.

--block-size TOKENS          underscores become dashes
512M, 4G, 1.5G               byte sizes (powers of 1024)
auto                         numbers that engine.config.resolve can choose
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import Field
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from engine.config.config import Config

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def flag_name(field_name: str) -> str:
    """'block_size' -> '--block-size'."""
    return "--" + field_name.replace("_", "-")


def size(text: str) -> int:
    """Bytes from '4096', '512M', '1.5G', '4GiB'. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or 512M, 1.5G, 2T")
    number = float(match[1]) * UNITS[match[2]] if "." in match[1] else int(match[1]) * UNITS[match[2]]
    return int(number)


def metavar(spec: Field[Any]) -> str:
    """The placeholder of a value in --help."""
    meta = spec.metadata
    if meta["choices"]:
        return "{" + ",".join([*meta["choices"], *(["FILE.py:NAME"] if meta["file"] else [])]) + "}"
    for unit in ("bytes", "ms"):
        if spec.name.endswith("_" + unit):
            return unit.upper()
    return str(meta["unit"] or spec.name.rsplit("_", 1)[-1]).upper()


@cache
def _types() -> dict[str, Any]:
    """The type of each field of Config. Asked for every flag, and Python would evaluate all annotations each time."""
    return get_type_hints(Config)


def reader(spec: Field[Any]) -> Callable[[str], Any]:
    """Converts text to a value of the field; raises ArgumentTypeError with the violated rule."""
    meta = spec.metadata
    kind = _types()[spec.name]

    def read(text: str) -> Any:
        if meta["file"] and re.search(r"\.py(:\w+)?$", text):
            return text
        if meta["choices"]:
            return _chosen(text, meta["choices"])
        if kind not in (int, float):
            if not text.strip():
                raise argparse.ArgumentTypeError("must not be empty")
            return text
        if meta["auto"] is not None and text in ("auto", str(meta["auto"])):
            return meta["auto"]
        return _bounded(_number(text, kind, spec.name), meta["least"], meta["most"])

    return read


def _chosen(text: str, choices: Sequence[str]) -> str:
    if text in choices:
        return text
    near = get_close_matches(text, choices, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, not {text!r}{hint}")


def _number(text: str, kind: type, name: str) -> float:
    try:
        if name.endswith("_bytes"):
            return size(text)
        number: float = kind(text)
    except ValueError as error:
        if name.endswith("_bytes"):
            raise argparse.ArgumentTypeError(str(error)) from None
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}") from None
    return number


def _bounded(number: float, least: float | None, most: float | None) -> float:
    if (least is None or number >= least) and (most is None or number <= most):
        return number
    rule = f"between {least} and {most}" if most is not None else f"at least {least}"
    raise argparse.ArgumentTypeError(f"must be {rule}, not {number}")


def spell(spec: Field[Any], value: Any) -> str:
    """A value in the user's notation."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if spec.metadata["auto"] is not None and value == spec.metadata["auto"]:
        return "auto"
    if spec.name.endswith("_bytes"):
        return _spell_size(value)
    return str(value)


def _spell_size(value: int) -> str:
    for letter, factor in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if value >= factor:
            exact = value % factor == 0
            return f"{value // factor}{letter}" if exact else f"{value / factor:.2f}{letter} ({value} bytes)"
    return str(value)
