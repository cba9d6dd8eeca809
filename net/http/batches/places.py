"""Where each line of an input file is.

Bodies stay on the disk until their line runs: the bodies of one file of 200 MB would be more than 1 GB of objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from net.http.batches.line import MAX_LINE_BYTES, MAX_LINES, SHOWN_ERRORS, Line, LineError, opened, parse


@dataclass(frozen=True, slots=True)
class Place:
    """One line of a file."""

    number: int  # from 0, without empty lines
    custom_id: str
    offset: int  # bytes from the begin of the file
    length: int  # bytes


def places(path: Path, endpoint: str, valid_for: str | None) -> tuple[list[Place], list[dict[str, Any]]]:
    """(the lines with a custom_id of their own, what is wrong with others). valid_for: the model that each body must
    name; None: bodies are not looked at, because they were valid before. Raises OSError."""
    found, errors, known = [], list[dict[str, Any]](), set[str]()
    for number, (offset, raw) in enumerate(_lines(path)):
        if number >= MAX_LINES:
            message = f"a batch may have {MAX_LINES} lines, this file has more"
            errors.append({"code": "too_many_lines", "line": None, "message": message, "param": None})
            break
        try:
            if valid_for is None:
                custom_id = opened(raw)["custom_id"]
            else:
                custom_id = parse(raw, number, endpoint, valid_for).custom_id
            if custom_id in known:
                raise LineError("duplicate_custom_id", f"{custom_id!r} names an earlier line", "custom_id")
        except LineError as error:
            if len(errors) < SHOWN_ERRORS:
                errors.append(error.entry(number + 1))
            continue
        known.add(custom_id)
        found.append(Place(number, custom_id, offset, len(raw)))
    if not found and not errors:
        errors = [{"code": "empty_file", "line": None, "message": "the file has no lines", "param": None}]
    return found, errors


def line_at(path: Path, place: Place, endpoint: str, model: str) -> Line:
    """Read one line. Raises LineError, OSError."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return parse(file.read(place.length), place.number, endpoint, model)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each line that is not empty. Of a line that is too long it gives the begin, one byte more than
    a line may have."""
    with path.open("rb") as file:
        offset = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            rest = raw
            if raw.strip():
                yield offset, raw
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
            offset = file.tell()
