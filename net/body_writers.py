"""Writers of types in JSON form, for net/bodies.py. Pure.

The writer of a dataclass is a generated function, as its reader is (net/body_readers.py). For
`Probe(horizon_s: float, to: Sequence[str], more: bool = False)` it is

    def write(value):
        body = {"horizon_s": value.horizon_s, "to": value.to}
        v2 = value.more
        if v2 is not default2 and v2 != default2:
            body["more"] = v2
        return body
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from net.body_readers import REQUIRED, but_none, default_of, generated

Write = Callable[[Any], Any] | None
"""None: the value is its own JSON form."""


@cache
def writer(kind: Any) -> Write:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is bytes:
        return bytes.hex
    if origin in (Union, UnionType):
        write = writer(but_none(parts))
        return None if write is None else partial(_or_none, write)
    if origin is tuple and parts[-1] is not Ellipsis:
        assert not any(map(writer, parts)), f"no JSON form is known for {kind}"
        return None
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple: orjson does not write it as a list
        return list
    if origin in (list, tuple, Sequence):
        write = writer(parts[0])
        return None if write is None else partial(_written, write)
    if origin in (dict, Mapping):
        write = writer(parts[1])
        return None if write is None and parts[0] is str else partial(_keyed, write or _same)
    return _fields(kind) if is_dataclass(kind) else None


def _fields(kind: Any) -> Write:
    hints = get_type_hints(kind)
    names: dict[str, Any] = {}
    always: list[str] = []
    others = ""
    for i, one in enumerate(fields(kind)):
        names[f"write{i}"] = write = writer(hints[one.name])
        names[f"default{i}"] = default = default_of(one)
        if default is REQUIRED:
            found = f"value.{one.name}"
            always.append(f"{one.name!r}: {found if write is None else f'write{i}({found})'}")
        else:
            found = f"v{i}" if write is None else f"write{i}(v{i})"
            others += f"""
    v{i} = value.{one.name}
    if v{i} is not default{i} and v{i} != default{i}:
        body[{one.name!r}] = {found}"""
    source = f"""
def write(value):
    body = {{{", ".join(always)}}}{others}
    return body
"""
    write_all: Write = generated("write", source, kind, names)
    return write_all


def _written(write: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    return [write(one) for one in values]


def _keyed(write: Callable[[Any], Any], values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): write(one) for name, one in values.items()}


def _or_none(write: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else write(value)


def _same(value: Any) -> Any:
    return value
