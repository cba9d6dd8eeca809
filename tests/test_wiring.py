"""How the objects of the house are put together: few arguments, callbacks by their own methods, few generators."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.modules import MODULES, within

# A constructor takes few arguments; arguments that belong together are a dataclass with a name. A dataclass writes no
# __init__ and is exempt: its fields are named where it is made, and it is how other constructors stay short.
FEW_ARGUMENTS = 7


def constructors(source: str) -> Iterator[tuple[str, int]]:
    """(class, how many arguments its __init__ takes besides self) of every class that writes one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == "__init__":
                    args = one.args
                    yield node.name, len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1


def test_constructors_take_few_arguments():
    found = {(name, *one) for name, path in MODULES.items() for one in constructors(path.read_text())}
    assert [one for one in sorted(found) if one[2] > FEW_ARGUMENTS] == []


def test_the_constructor_reader_counts_every_kind_of_argument():
    source = "class A:\n    def __init__(self, a, /, b, *, c=1, **more): pass\n@dataclass\nclass B:\n    x: int\n"
    assert list(constructors(source)) == [("A", 3)], "a dataclass has no __init__ to count"


def test_a_token_passes_at_most_three_generators():
    """From the queue of its flight to the HTTP response; each costs two switches per token."""

    def generators(name: str) -> list[str]:
        tree = ast.parse(MODULES[name].read_text())
        return [
            f"{name}.{node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.AsyncFunctionDef) and any(isinstance(one, ast.Yield) for one in ast.walk(node))
        ]

    way = [
        name
        for name in MODULES
        if within(
            name,
            (
                "engine.front",
                "engine.node.frontend",
                *(f"net.http.openai.{of}" for of in ("streams", "serving", "sse")),
            ),
        )
    ]
    found = [one for name in way for one in generators(name)]
    assert len(found) <= 3, found


def own_callbacks(source: str) -> set[str]:
    """The attributes that a class declares as a Callable."""
    declared = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign))
    return {
        node.target.attr
        for node in declared
        if isinstance(node.target, ast.Attribute) and "Callable[" in ast.unparse(node.annotation)
    }


def set_from_outside(source: str, callbacks: Iterable[str]) -> list[tuple[str, int]]:
    """(target, line) of every assignment to such an attribute of another object than `self`."""
    return [
        (ast.unparse(target), node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr in callbacks and ast.unparse(target.value) != "self"
    ]


def test_no_callback_is_set_from_outside():
    """It is an argument of the constructor, or a method of its object takes it: on_lost, watch, ..."""
    sources = {name: path.read_text() for name, path in MODULES.items()}
    callbacks = set().union(*map(own_callbacks, sources.values()))
    found = {name: set_from_outside(source, callbacks) for name, source in sources.items()}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_the_reader_of_callbacks_sees_assignments_to_other_objects():
    source = (
        "self.ended: Callable[[], None] | None = None\nself.ended = one\nother.ended = two\nself.rail.ended = three\n"
    )
    assert own_callbacks(source) == {"ended"}
    assert set_from_outside(source, {"ended"}) == [("other.ended", 3), ("self.rail.ended", 4)]
