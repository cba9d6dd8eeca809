"""The rule for every test: an error-level log line fails it, here and in the log of a node that it started.

This covers what nobody looks at otherwise: 'Task exception was never retrieved', exceptions in callbacks of the event
loop, handlers that failed. A test that provokes an error line names it:

    @pytest.mark.expects_error("cannot report its load")       # a regular expression, searched in the whole entry

An entry is a log line with its traceback. An expected entry that does not come fails the test too, unless
`always=False`: then it may come (which of two nodes notices a fault first is often chance).
"""

from __future__ import annotations

import gc
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

WHAT_TO_DO = (
    "error-level log lines that this test does not expect. Either the code is wrong, then mend it; or the test "
    'provokes the line, then name it: @pytest.mark.expects_error("regular expression"). See tests/complaints.py'
)
ENTRY = re.compile(r"^(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z] |\{\"time\")")
"""What begins an entry in the log of a node; see engine/observe/logs.py."""
ERROR = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [EC] |^\{\"time\".*\"level\": \"(?:error|critical)\"")
TRACEBACK = "Traceback (most recent call last)"


class ErrorEntries(logging.Handler):
    """Keeps the error-level entries of this process."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self._entries: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._entries.append(self.format(record))

    def take(self) -> list[str]:
        """Those since the last call."""
        entries, self._entries = self._entries, []
        return entries


def complaints(log: str) -> list[str]:
    """Entries of a node's log that are errors or have a traceback."""
    entries: list[list[str]] = []
    for line in log.splitlines():
        if ENTRY.match(line) or not entries:
            entries.append([line])
        else:
            entries[-1].append(line)
    return ["\n".join(entry) for entry in entries if ERROR.match(entry[0]) or any(TRACEBACK in line for line in entry)]


class NodeLogs:
    """The logs of the nodes that this process started, read up to where they have been judged."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}

    def take(self) -> list[str]:
        """Complaints since the last call."""
        nodes = sys.modules.get("lab.launch.nodes")
        found = []
        for node in [] if nodes is None else nodes.started:
            if not node.log.exists():
                continue
            with node.log.open("rb") as file:
                file.seek(self._read.get(str(node.log), 0))
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]  # the rest of the line is on its way
            self._read[str(node.log)] = self._read.get(str(node.log), 0) + len(new)
            found += [f"[{node.name}] {entry}" for entry in complaints(new.decode(errors="replace"))]
        return found


HERE = ErrorEntries()
NODES = NodeLogs()


def judge(entries: Sequence[str], marks: Sequence[pytest.Mark]) -> str | None:
    """What is wrong with the entries of a test that has these `expects_error` marks."""
    expected = [(pattern, mark.kwargs.get("always", True)) for mark in marks for pattern in mark.args]
    unexpected = [entry for entry in entries if not any(re.search(pattern, entry) for pattern, _ in expected)]
    if unexpected:
        return f"{len(unexpected)} {WHAT_TO_DO}\n" + "\n".join(unexpected)
    for pattern, always in expected:
        if always and not any(re.search(pattern, entry) for entry in entries):
            return f"the error line that this test expects, {pattern!r}, did not come: does the test still provoke it?"
    return None


@pytest.fixture(autouse=True)
def no_unexpected_errors(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Fails the test for error lines since the last test ended: those of the set-up of its module count too. With
    `tmp_path`, in which nodes keep their logs: pytest removes it after this, not before."""
    root = logging.getLogger()
    root.addHandler(HERE)
    yield
    gc.collect(1)  # a task with an exception that nobody has looked at says so when it is collected
    if (wrong := judge([*HERE.take(), *NODES.take()], list(request.node.iter_markers("expects_error")))) is not None:
        pytest.fail(wrong, pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def no_unexpected_errors_at_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for what the end of a module's clusters brings, and for what only a full collection finds."""
    logging.getLogger().addHandler(HERE)
    yield
    if any(inspect.iscoroutinefunction(one) for one in vars(request.module).values()):
        gc.collect()
    if (wrong := judge([*HERE.take(), *NODES.take()], list(request.node.iter_markers("expects_error")))) is not None:
        pytest.fail(f"after the last test of {request.module.__name__}: {wrong}", pytrace=False)
