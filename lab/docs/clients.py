"""The tables of docs/clients.md: which client ran what against a cluster, and the result."""

from __future__ import annotations

from pathlib import Path

from lab.docs.figures import RESULTS, Result, caption

COMMAND = "scripts/tools.py stock-clients"
NEWEST, EARLIER = "client-libraries", "stock-clients"


def clients(folder: Path = RESULTS) -> str:
    """One line for each run of the newest result."""
    return _table(Result.newest(NEWEST, folder), frozenset())


def earlier_clients(folder: Path = RESULTS) -> str:
    """The runs of clients that are in an earlier result only."""
    known = frozenset(row["client"] for row in Result.newest(NEWEST, folder).rows)
    return _table(Result.newest(EARLIER, folder), known)


def _table(result: Result, without: frozenset[str]) -> str:
    lines = ["| client | version | what ran | result |", "|---|---|---|---|"]
    for row in result.rows:
        if row["client"] in without:
            continue
        _, _, what = row["case"].partition(": ")
        found = f"passed: {row['note']}" if row["ours"] else f"**failed**: {row['note']}"
        cells = (f"`{row['client']}`", row["version"], what, found)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join([*lines, "", caption(result, COMMAND, timed=False)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
