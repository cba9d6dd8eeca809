"""What the launchers' tests measure: printed, and kept as rows of one result file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.bench.common.results import Row, write_result

VARIABLE = "MOONCAKE_LAUNCHER_RESULTS"
FIRST, NOTICED, BACK = "first answer", "loss noticed", "lost node back"
ANSWERS, ERRORS = "answers meanwhile", "errors meanwhile"


class Told:
    """`told(case, metric, value)`: seconds since the launcher's command, or since the loss of a node; or counts."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def __call__(self, case: str, metric: str, value: float, unit: str = "s") -> None:
        self.rows.append(Row(case, metric, unit, value))
        print(f"{case}: {metric}: {value:.4g} {unit}")

    def survived(self, case: str, answers: int, errors: int) -> None:
        """What a client that asked all the time while a node was lost got."""
        self(case, ANSWERS, answers, "")
        self(case, ERRORS, errors, "")

    def write(self, path: Path) -> None:
        cases = list(dict.fromkeys(row.case for row in self.rows))
        write_result({"cases": cases}, self.rows, path)


@pytest.fixture(scope="session")
def told(request: pytest.FixtureRequest) -> Iterator[Told]:
    """At the end of the session the file that the variable names has the rows, unless a test failed."""
    path = Path(os.environ[VARIABLE]).resolve() if VARIABLE in os.environ else None
    kept = Told()
    yield kept
    if path is not None and kept.rows and not request.session.testsfailed:
        kept.write(path)
