"""A field of Config that is also a command-line flag: its default, and its data for --help and the parser."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def flag(
    default: Any,
    group: str,
    help: str,
    choices: tuple[str, ...] = (),
    *,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    auto: int | None = None,
    file: bool = False,
    several: bool = False,
) -> Any:
    """A Config field that becomes a command-line flag.

    `unit` names the value in --help (bytes and ms follow from the field's name). `least` and `most` bound it.
    `auto` is the number that means "let engine.config.resolve choose"; the user writes 'auto'.
    `file`: the flag also accepts FILE.py or FILE.py:NAME.
    `several`: the flag may be given several times; the field has the values joined by spaces.
    """
    metadata = {
        "group": group,
        "help": help,
        "choices": choices,
        "unit": unit,
        "least": least,
        "most": most,
        "auto": auto,
        "file": file,
        "several": several,
    }
    return field(default=default, metadata=metadata)
