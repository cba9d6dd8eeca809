"""The error messages in the source: those that the API answers, and those that end a command with exit code 2.

A message is read where the exception is made: a literal, an f-string, one of two by a condition, or a name that the
same function or the file gives to one of these. Values become '…'. A message that comes from somewhere else, such as
another exception, cannot be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

STATUSES = {
    "Overloaded": ("429", "overloaded"),
    "Unavailable": ("503", "unavailable"),
    "bad_request": ("400", ""),
    "Refused": ("409", ""),
}
"""Of net/http/common/errors.py: what makes an error -> its status, and its code unless it names one."""

USER_ERRORS = (
    *("UsageError", "ModelError", "ClusterError", "ListenError", "SsdError"),
    *("KeyFileError", "ApiKeyFileError", "OtlpError"),
)

Names = Mapping[str, list[str]]
"""A name -> the texts that it may be."""


class Refusal(NamedTuple):
    """`status` is empty for a message of the command line."""

    status: str
    code: str
    message: str
    file: str


def refusals(path: Path, root: Path) -> Iterator[Refusal]:
    """Every error with a message that can be read in `path`, a file below `root`."""
    tree = ast.parse(path.read_text())
    for call, names in _calls(tree, _named(tree.body, {})):
        for status, code, message in _of_call(call, names):
            yield Refusal(status, code, message, str(path.relative_to(root)))


def _of_call(call: ast.Call, names: Names) -> Iterator[tuple[str, str, str]]:
    if not isinstance(call.func, ast.Name) or not call.args:
        return
    name, arguments = call.func.id, list(call.args)
    status, code = STATUSES.get(name, ("", ""))
    if name == "ApiError" and isinstance(arguments[0], ast.Constant):
        status = str(arguments.pop(0).value)  # type: ignore[attr-defined]
    if not arguments or not (status or name in USER_ERRORS):
        return
    given = [word.value for word in call.keywords if word.arg == "code"] or arguments[2:3] * (name == "bad_request")
    code = next((text for one in given for text in _texts(one, names)), code)
    for message in _texts(arguments[0], names):
        if message.strip("… :;"):
            yield status, f"`{code}`" if code else "", message


def _calls(node: ast.AST, names: Names) -> Iterator[tuple[ast.Call, Names]]:
    """Every call below `node`, with the names of the functions around it."""
    for child in ast.iter_child_nodes(node):
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        known = _named(ast.walk(child), names) if function else names
        if isinstance(child, ast.Call):
            yield child, known
        yield from _calls(child, known)


def _named(nodes: Iterable[ast.AST], names: Names) -> Names:
    """`names`, and those that assignments among `nodes` give to texts."""
    found: dict[str, list[str]] = {}
    for one in nodes:
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(target := one.targets[0], ast.Name):
            found.setdefault(target.id, []).extend(_texts(one.value, names))
    return {**names, **found}


def _texts(node: ast.AST, names: Names) -> list[str]:
    """The texts that an expression may be; none if they cannot be read."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)]
        case ast.IfExp(body=one, orelse=other):
            return [*_texts(one, names), *_texts(other, names)]
        case ast.Name(id=name):
            return names.get(name, [])
    return []
