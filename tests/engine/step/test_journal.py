"""Who writes to a request: the batcher and its parts. What others have to say goes into its journal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from engine.step.journal import Journal
from engine.step.request import Request

ENGINE = Path(__file__).resolve().parents[3] / "engine"
OWNERS = {"request.py", "batcher.py", "step_planner.py", "block_book.py", "seats.py"}
CHANGES = {"append", "extend", "insert", "clear", "pop", "remove", "update", "sort"}
METHODS = {"move", "count_cached"}
FIELDS = {one.name for one in fields(Request)} - {"journal", "table"}


def of_request(node: ast.AST) -> bool:
    """Is it `request.FIELD` or `row.request.FIELD`?"""
    return isinstance(node, ast.Attribute) and node.attr in FIELDS and is_request(node.value)


def is_request(node: ast.AST) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("request", "owned", "prompt")


def writes(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES:
                targets = [node.func.value]
            elif node.func.attr in METHODS and is_request(node.func.value):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in flat:
            whole = target.value if isinstance(target, ast.Subscript) else target
            if of_request(whole):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_only_the_batcher_and_its_parts_write_to_a_request():
    found = {
        str(path.relative_to(ENGINE)): lines
        for path in sorted(ENGINE.rglob("*.py"))
        if path.name not in OWNERS and (lines := list(writes(path.read_text())))
    }
    assert found == {}


def test_every_kind_of_write_is_seen():
    for line in (
        "request.handover = True",
        "row.request.num_computed += 1",
        "request.keys.append(1)",
        "request.block_ids[0] = 1",
        "a, request.state = 1, 2",
        "request.move(now, state)",
        "del request.token_ids[2:]",
    ):
        assert list(writes(line)), line
    for line in ("request.journal.note(0.0, 'x', {})", "x = request.state", "self.request = request"):
        assert not list(writes(line)), line


def test_a_journal_is_drained_once_and_its_steps_are_one_event():
    journal = Journal()
    journal.note(1.0, "running", {"computed": 0})
    journal.computed(2.0, 3.0, 16, others_s=0.25)
    journal.computed(3.0, 3.5, 1, others_s=0.125)
    assert journal.drain(4.0) == [
        (1.0, "running", {"computed": 0}),
        (4.0, "computed", {"intervals": [[2.0, 1.0, 16], [1.0, 0.5, 1]], "others_s": 0.375}),
    ]
    assert journal.drain(5.0) == []
    journal.computed(5.0, 6.0, 1)
    assert journal.drain(6.0) == [(6.0, "computed", {"intervals": [[1.0, 0.0, 1]]})]
