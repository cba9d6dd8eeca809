"""Checks of the arguments of engines' calls. A wrong type is a TypeError, as with upstream; a wrong value is a code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from connect.common.raw_memory import Pieces


def text(value: Any, what: str = "key") -> str:
    """Bytes count as UTF-8. Raises TypeError for anything else than the two."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if not isinstance(value, str):
        raise TypeError(f"{what} must be str, not {type(value).__name__}")
    return value


def texts(values: Any, what: str = "keys") -> list[str]:
    """Raises TypeError unless they are strings."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{what} must be a list of str, not {type(values).__name__}")
    return [text(value, what) for value in values]


def numbers(values: Any, what: str) -> list[int]:
    """Integers of at least 0. Raises TypeError for anything else."""
    out = [value.__index__() if hasattr(value, "__index__") else value for value in values]
    if any(not isinstance(value, int) or value < 0 for value in out):
        raise TypeError(f"{what} must be integers of at least 0")
    return out


def pieces(addresses: Any, sizes: Any) -> Pieces | None:
    """The memory of one value; None for lists of different lengths or an address of 0. Raises TypeError."""
    where, lengths = numbers(addresses, "addresses"), numbers(sizes, "sizes")
    if len(where) != len(lengths) or not all(where):
        return None
    return Pieces(list(zip(where, lengths, strict=True)))


def rows(all_addresses: Sequence[Any], all_sizes: Sequence[Any], count: int) -> list[Pieces | None] | None:
    """The memory of `count` values, None for one whose lists do not fit together; None if there are not as many lists.
    Raises TypeError."""
    if len(all_addresses) != count or len(all_sizes) != count:
        return None
    return [pieces(*row) for row in zip(all_addresses, all_sizes, strict=True)]
