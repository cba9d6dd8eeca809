"""Readers of types in JSON form: the checks behind net/bodies.py. Pure.

A short message costs more in calls than in checks. So the reader of a dataclass is a function that is generated
once, as the standard library generates its `__init__`: it checks plain fields in line, and calls the readers of other
fields. For `Probe(horizon_s: float, to: Sequence[str], more: bool = False)` the reader is

    def read(body):
        if type(body) is not dict:
            raise wrong("an object", body)
        try:
            v0 = body["horizon_s"]
            v1 = body["to"]
        except KeyError as missing:
            raise BodyError(f"field {missing} is missing") from None
        left, name = len(body) - 2, ""
        try:
            if type(v0) is not float or v0 - v0 != 0.0:  # infinity - infinity is not a number
                name = "horizon_s"
                v0 = read0(v0)
            name = "to"
            v1 = read1(v1)
            if left and "more" in body:
                left, v2 = left - 1, body["more"]
                if type(v2) is not bool:
                    name = "more"
                    v2 = read2(v2)
            else:
                v2 = default2
        except BodyError as error:
            raise BodyError(f"{name}: {error}") from None
        if left:
            raise unknown(body)
        try:
            return make(v0, v1, v2)
        except ValueError as error:
            raise BodyError(str(error)) from None
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from textwrap import indent
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

Read = Callable[[Any], Any]
SCALARS = (int, str, bool)
NUMBERS = frozenset((int, float))
SHOWN_CHARS = 40  # characters of a wrong value in an error
REQUIRED: Any = object()  # marks a field without a default


class BodyError(ValueError):
    """A body does not have the form of its kind of message."""


# --- reading


@cache
def reader(kind: Any) -> Read:
    """Raises TypeError for a type without a JSON form; the reader raises BodyError."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return _anything
    if kind in SCALARS:
        return partial(_scalar, kind)
    if kind is float:
        return _number
    if kind is bytes:
        return _hex
    if origin in (Union, UnionType):
        return partial(_optional, reader(but_none(parts)))
    if origin is tuple and parts[-1] is not Ellipsis:
        return partial(_row, tuple(map(reader, parts)), tuple)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return partial(_row, tuple(map(reader, get_type_hints(kind).values())), partial(_made, kind))
    if origin in (list, tuple, Sequence):
        if parts[0] in SCALARS:
            return partial(_scalars, parts[0], origin is tuple)
        if parts[0] is float:
            return partial(_numbers, origin is tuple)
        return partial(_items, reader(parts[0]), origin is tuple)
    if origin in (dict, Mapping):
        return partial(_entries, int if parts[0] is int else None, reader(parts[1]))
    if is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"no JSON form is known for {kind}")


def but_none(parts: Sequence[Any]) -> Any:
    (kind,) = (part for part in parts if part is not NoneType)
    return kind


def _record(kind: Any) -> Read:
    hints, known = get_type_hints(kind), fields(kind)
    names: dict[str, Any] = {"make": kind, "wrong": _wrong, "unknown": partial(_unknown, kind), "BodyError": BodyError}
    needed, taken, checks = 0, "", ""
    arguments: list[str] = []
    for i, one in enumerate(known):
        names[f"read{i}"] = reader(hints[one.name])
        check = _check(hints[one.name], f"v{i}", one.name, f"read{i}")
        if default_of(one) is REQUIRED:
            needed += 1
            taken += f"v{i} = body[{one.name!r}]\n"
            checks += check
        else:
            found = f"left, v{i} = left - 1, body[{one.name!r}]\n{check}"
            if one.default is MISSING:
                names[f"default{i}"], default = one.default_factory, f"default{i}()"
            else:
                names[f"default{i}"], default = one.default, f"default{i}"
            checks += f"if left and {one.name!r} in body:\n{indent(found, '    ')}else:\n    v{i} = {default}\n"
        arguments.append(f"{one.name}=v{i}" if one.kw_only else f"v{i}")
    arguments.sort(key=lambda argument: "=" in argument)
    source = f"""
def read(body):
    if type(body) is not dict:
        raise wrong("an object", body)
    try:
{indent(taken or "pass", " " * 8)}
    except KeyError as missing:
        raise BodyError(f"field {{missing}} is missing") from None
    left, name = len(body) - {needed}, ""
    try:
{indent(checks or "pass", " " * 8)}
    except BodyError as error:
        raise BodyError(f"{{name}}: {{error}}") from None
    if left:
        raise unknown(body)
    try:
        return make({", ".join(arguments)})
    except ValueError as error:
        raise BodyError(str(error)) from None
"""
    read: Read = generated("read", source, kind, names)
    return read


def _check(kind: Any, value: str, field: str, read: str) -> str:
    """Lines that check the variable `value`, and convert it where its type requires that."""
    call = f"name = {field!r}\n{value} = {read}({value})\n"
    if get_origin(kind) in (Union, UnionType):
        condition, kind = f"{value} is not None and ", but_none(get_args(kind))
    else:
        condition = ""
    if kind is Any:
        return ""
    if kind in SCALARS:
        return f"if {condition}type({value}) is not {kind.__name__}:\n{indent(call, '    ')}"
    if kind is float:
        finite = f"(type({value}) is not float or {value} - {value} != 0.0)"
        return f"if {condition}{finite}:\n{indent(call, '    ')}"
    return f"if {value} is not None:\n{indent(call, '    ')}" if condition else call


def generated(name: str, source: str, kind: Any, names: dict[str, Any]) -> Any:
    exec(compile(source, f"<{name} {kind.__qualname__}>", "exec"), names)
    return names[name]


def default_of(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return REQUIRED if field.default_factory is MISSING else field.default_factory()


def _unknown(kind: Any, body: dict[Any, Any]) -> BodyError:
    known = {one.name for one in fields(kind)}
    name = next(name for name in body if name not in known)
    return BodyError(f"unknown field {_shown(name)}")


def _anything(value: Any) -> Any:
    return value


def _scalar(kind: type, value: Any) -> Any:
    if type(value) is not kind:  # True is an int to isinstance
        raise _wrong(kind.__name__, value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong("a finite number", value)
    return float(value)


def _hex(value: Any) -> bytes:
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        raise _wrong("hexadecimal digits", value) from None


def _optional(read: Read, value: Any) -> Any:
    return None if value is None else read(value)


def _list(value: Any) -> Sequence[Any]:
    if type(value) is not list and type(value) is not tuple:
        raise _wrong("a list", value)
    found: Sequence[Any] = value
    return found


def _scalars(kind: type, as_tuple: bool, value: Any) -> Any:
    if list(map(type, _list(value))).count(kind) != len(value):
        raise _wrong(kind.__name__, next(one for one in value if type(one) is not kind))
    return tuple(value) if as_tuple else value


def _numbers(as_tuple: bool, value: Any) -> Any:
    kinds = {*map(type, _list(value))}
    if not kinds <= NUMBERS or not all(map(math.isfinite, value)):
        raise _wrong("finite numbers", value)
    found = value if int not in kinds else list(map(float, value))
    return tuple(found) if as_tuple else found


def _row(readers: Sequence[Read], make: Callable[[Sequence[Any]], Any], value: Any) -> Any:
    if len(_list(value)) != len(readers):
        raise _wrong(f"a list of {len(readers)}", value)
    return make([read(one) for read, one in zip(readers, value, strict=True)])


def _made(kind: Any, values: Sequence[Any]) -> Any:
    return kind(*values)


def _items(read: Read, as_tuple: bool, value: Any) -> Any:
    found = [read(one) for one in _list(value)]
    return tuple(found) if as_tuple else found


def _entries(key: Callable[[str], Any] | None, read: Read, value: Any) -> dict[Any, Any]:
    """`key`: of None, the keys stay what they are."""
    if type(value) is not dict:
        raise _wrong("an object", value)
    if key is None:
        return {name: read(one) for name, one in value.items()}
    try:
        return {key(name): read(one) for name, one in value.items()}
    except BodyError:
        raise
    except ValueError:
        raise _wrong("an object whose keys are integers", value) from None


def _wrong(wanted: str, value: Any) -> BodyError:
    return BodyError(f"expected {wanted}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Of lists and objects only the size: the text of millions of elements takes seconds, and a deep value has none."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    begin = value[:SHOWN_CHARS] if isinstance(value, str) else value
    return f"{begin!r:.{SHOWN_CHARS}}"
