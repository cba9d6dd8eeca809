"""Records the work and the duration of every step as lines of a file (--record-steps). scripts/tools.py validate fits
step models to them.

A line: {"begin", "end": seconds of one clock, in the engine thread; "idle": the engine was idle before the step, so the
gap before it is not overhead; "waited": its time does not follow from its rows, because it waited for KV to arrive, or
because tokens passed only some of the layers; "rows": [[tokens, start], ...]}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from engine.config.config import Config
from engine.config.flags import UsageError
from engine.observe.line_file import LineFile
from engine.step.step import Step


class StepRecorder:
    """Appends to a file. `add` runs between two steps and only collects lines; `write` writes them."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._file = LineFile(path, "--record-steps")
        self._notes: list[dict[str, Any]] = []

    def add(self, step: Step, begin: float, end: float, idle: bool, waited: bool) -> None:
        """Record the step's tokens, drafts included, and their positions."""
        if not self._file.is_open:
            return
        rows = [(row.num_tokens, row.start) for row in step.rows]
        waited = waited or any(row.share < 1 for row in step.rows)
        self._notes.append({"begin": begin, "end": end, "idle": idle, "waited": waited, "rows": rows})

    def write(self) -> None:
        notes, self._notes = self._notes, []
        self._file.add(b"".join(orjson.dumps(note, option=orjson.OPT_APPEND_NEWLINE) for note in notes))

    def close(self) -> None:
        self.write()
        self._file.close()


def step_recorder(config: Config) -> StepRecorder | None:
    """The recorder of --record-steps, or None. Raises UsageError if the file cannot be opened."""
    if config.record_steps is None:
        return None
    try:
        return StepRecorder(Path(config.record_steps))
    except OSError as error:
        raise UsageError(f"--record-steps {config.record_steps}: {error.strerror}") from None
