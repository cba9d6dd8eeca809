"""Stores measured cells on disk immediately, so that an interrupted benchmark continues where it stopped.

A cell is one case on one server in one round. The file has one JSON object per line: first the benchmark's question,
then the cells. A file with another question is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from lab.bench.engine.cases import Samples


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one case on one server in one round."""

    server: str
    case: str
    round: int
    samples: Samples  # empty after an error
    error: str | None = None


class Cells:
    """The cells so far. Failed ones are tried again after an interruption; a line cut off by a crash is dropped."""

    def __init__(self, path: Path, asked: Mapping[str, Any], fresh: bool = False) -> None:
        self.path = path
        self._cells: dict[tuple[str, str, int], Cell] = {}
        question = orjson.dumps({"asked": dict(asked)}, option=orjson.OPT_SORT_KEYS)
        lines = path.read_bytes().split(b"\n") if path.exists() and not fresh else []
        if lines and lines[0] == question:
            for line in lines[1:-1]:
                cell = Cell(**orjson.loads(line))
                if cell.error is None:
                    self._cells[cell.server, cell.case, cell.round] = cell
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [question, *(orjson.dumps(asdict(cell)) for cell in self._cells.values())]
        path.write_bytes(b"\n".join(kept) + b"\n")

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, cell: Cell) -> None:
        self._cells[cell.server, cell.case, cell.round] = cell
        with self.path.open("ab") as file:
            file.write(orjson.dumps(asdict(cell)) + b"\n")

    def finish(self) -> None:
        """The run is complete: rename the file, so that the next run starts from the beginning."""
        self.path.replace(self.path.with_name(f"last-{self.path.name}"))

    def get(self, server: str, case: str, round_number: int) -> Cell | None:
        return self._cells.get((server, case, round_number))

    def of(self, server: str, case: str, rounds: int | None = None) -> list[Cell]:
        """The cells of one server and case, in the order of rounds: of the first `rounds`, or of all."""
        found = [cell for (s, c, _), cell in self._cells.items() if (s, c) == (server, case)]
        return sorted((cell for cell in found if rounds is None or cell.round < rounds), key=lambda cell: cell.round)

    def failed(self, server: str, case: str) -> bool:
        """Whether the server failed the case; then later rounds skip it."""
        return any(cell.error is not None for cell in self.of(server, case))
