"""Stores the figures of finished runs in a file, so that an interrupted ablation continues where it stopped."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


class Runs:
    """One JSON line per run. Only runs of the same commit and the same number of requests count; numbers are restored
    exactly. `taken` counts stored runs that were used, `made` new ones."""

    def __init__(self, path: Path, commit: str, requests: int | None) -> None:
        """Raises OSError."""
        self._path, self._about = path, {"commit": commit, "requests": requests}
        self.taken = self.made = 0
        self._known: dict[tuple[str, str, int], Figures] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the process was stopped in the middle of this line
            if row["requests"] == requests and row["commit"] == commit:
                self._known[row["ablation"], row["case"], row["seed"]] = row["figures"]

    def get(self, ablation: str, case: str, seed: int) -> Figures | None:
        """None if this run is not stored."""
        found = self._known.get((ablation, case, seed))
        self.taken += found is not None
        return found

    def put(self, ablation: str, case: str, seed: int, figures: Figures) -> None:
        """Store a run immediately."""
        self.made += 1
        row = {**self._about, "ablation": ablation, "case": case, "seed": seed, "figures": figures}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def pack(self, path: Path) -> None:
        """Write all stored runs compressed. Raises OSError."""
        if self._path.exists():
            path.write_bytes(lzma.compress(self._path.read_bytes()))
