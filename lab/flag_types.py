"""Numbers of the lab's command lines, as types for argparse: a value that cannot be is refused with the flag's name.

| type | accepts |
|---|---|
| positive | 1, 2, 3 ... |
| natural | 0, 1, 2 ... |
| port | 0 to 65535; 0 means any free one |
| above_zero | a finite number above 0 |
| above_zero_or_inf | the same, and inf |
| not_negative | a finite number of at least 0 |
| share | 0 to 1 |
| some_of_all | above 0, at most 1 |
| part | above 0, below 1 |
| percent | above 0, below 100 |
| names_of(...) | some of these names, joined by commas |
| file_to_write | a path that is a file, or can become one |
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

MOST = 2**63 - 1  # of a whole number: more fits no counter
LAST_PORT = 65_535


def positive(text: str) -> int:
    return _whole(text, 1, MOST, "a whole number of at least 1")


def natural(text: str) -> int:
    return _whole(text, 0, MOST, "a whole number of at least 0")


def port(text: str) -> int:
    return _whole(text, 0, LAST_PORT, f"a port from 0 to {LAST_PORT}")


def above_zero(text: str) -> float:
    return _number(text, lambda value: 0 < value < math.inf, "a finite number above 0")


def above_zero_or_inf(text: str) -> float:
    return _number(text, lambda value: value > 0, "a number above 0")


def not_negative(text: str) -> float:
    return _number(text, lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def share(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def some_of_all(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def part(text: str) -> float:
    return _number(text, lambda value: 0 < value < 1, "a number above 0 and below 1")


def percent(text: str) -> float:
    return _number(text, lambda value: 0 < value < 100, "a number above 0 and below 100")


def names_of(*known: str) -> Callable[[str], str]:
    """A type for names joined by commas, each of which must be one of `known`; the value is the text."""

    def names(text: str) -> str:
        for name in text.split(","):
            if name not in known:
                raise ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return text

    return names


def file_to_write(text: str) -> Path:
    """The path. Refuses one that cannot become a file: it is found out before the run whose result it is for."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"must be a file, got {text!r}, which is a directory")
    if not (above := next(one for one in path.parents if one.exists())).is_dir():
        raise ArgumentTypeError(f"must be in a directory, got {text!r}, but {above} is none")
    return path


def _whole(text: str, least: int, most: int, wanted: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return value


def _number(text: str, fits: Callable[[float], bool], wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return value
