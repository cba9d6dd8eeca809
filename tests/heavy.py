"""Tests marked `heavy` take long and repeat with other values what another test shows. `--skip-heavy` leaves them out;
the end of the run says how many, and how to run them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

REASON = "heavy: scripts/test --all runs it"


def one_in(count: int, *axes: Sequence[Any]) -> list[Any]:
    """Parameters of a test: every combination of the values of the axes. One in `count` is not heavy: the sum of its
    places on the axes is a multiple of it. So each pair of values of two axes occurs in one that is not heavy, if there
    is another axis with at least `count` values."""
    params = []
    for chosen in product(*(enumerate(axis) for axis in axes)):
        heavy = sum(place for place, _ in chosen) % count
        params.append(pytest.param(*(value for _, value in chosen), marks=[pytest.mark.heavy] if heavy else []))
    return params


def best_first(levels: Sequence[str], types: Sequence[Any]) -> list[Any]:
    """(level, type) as parameters of a test. The first level, which is the best one and that of the nodes, has every
    type; a later one has a type of its own, and its others are heavy."""
    return [
        pytest.param(level, kind, marks=[pytest.mark.heavy] if i and j != i % len(types) else [])
        for i, level in enumerate(levels)
        for j, kind in enumerate(types)
    ]


def seeds(few: int, count: int) -> list[Any]:
    """range(count) as parameters of a test; all after the first `few` are heavy."""
    return [pytest.param(seed, marks=[pytest.mark.heavy] if seed >= few else []) for seed in range(count)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skip-heavy", action="store_true", help="leave out the tests marked heavy")


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    if config.getoption("--skip-heavy"):
        for item in items:
            if item.get_closest_marker("heavy"):
                item.add_marker(pytest.mark.skip(reason=REASON))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if count := sum(REASON in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(
            f"{count} tests marked heavy were left out; scripts/test --all and .ci/run --all run them"
        )
