"""Bodies of messages as dataclasses: checked when they are read, plain JSON on the wire. Pure.

The fields of the dataclass are the form: int, float, str, bool, bytes (as hex), None beside one of them, lists, dicts,
and other dataclasses. Reading is strict: no field may be missing or unknown, and nothing is converted but an integer
where a float is wanted. What a type cannot say, `__post_init__` checks by raising ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from net.errors import RemoteError

T = TypeVar("T")
Read = Callable[[Any], Any]
Write = Callable[[Any], Any] | None
"""None: the value is its own JSON form."""

SCALARS = (int, str, bool)
SHOWN = 40  # characters of a wrong value in an error


class BodyError(ValueError):
    """A body is not what its kind of message has."""


def decode(kind: type[T], body: object) -> T:
    """`body`: parsed JSON. Raises BodyError naming the field."""
    form: Any = kind
    try:
        found: T = _reader(form)(body)
    except BodyError as error:
        raise BodyError(f"{kind.__name__}: {error}") from None
    return found


def answered(kind: type[T], body: object) -> T:
    """A peer's answer. Raises RemoteError when it is none of this kind."""
    try:
        return decode(kind, body)
    except BodyError as error:
        raise RemoteError(f"the answer is not what was asked for: {error}", "bad_answer") from None


def encode(value: Any) -> dict[str, Any]:
    """The JSON form of a dataclass; lists in it are not copied."""
    form: Any = type(value)
    write = _writer(form)
    assert write is not None, f"{form} is no dataclass"
    body: dict[str, Any] = write(value)
    return body


def typed(
    kind: type[T], handler: Callable[[str, T, memoryview], Awaitable[Any]]
) -> Callable[[str, dict[str, Any], memoryview], Awaitable[Any]]:
    """A handler for Channel.handle from one that takes `kind` and returns a dataclass or None. It raises BodyError for
    a body that is not of this kind; the channel answers that with the code bad_request."""

    async def handle(peer: str, body: dict[str, Any], data: memoryview) -> dict[str, Any] | None:
        answer = await handler(peer, decode(kind, body), data)
        return None if answer is None else encode(answer)

    return handle


# --- reading


@cache
def _reader(kind: Any) -> Read:
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
        return partial(_optional, _reader(_but_none(parts)))
    if origin in (list, tuple, Sequence):
        return partial(_items, _reader(parts[0]), origin is tuple)
    if origin in (dict, Mapping):
        return partial(_entries, int if parts[0] is int else str, _reader(parts[1]))
    if is_dataclass(kind):
        return _record(kind)
    raise TypeError(f"no JSON form is known for {kind}")


def _but_none(parts: Sequence[Any]) -> Any:
    (kind,) = (part for part in parts if part is not NoneType)
    return kind


def _record(kind: Any) -> Read:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}

    def read(body: Any) -> Any:
        if type(body) is not dict:
            raise _wrong("an object", body)
        if unknown := body.keys() - readers.keys():
            raise BodyError(f"unknown field {sorted(unknown)[0]!r:.{SHOWN}}")
        if missing := needed - body.keys():
            raise BodyError(f"field {sorted(missing)[0]!r} is missing")
        values = {}
        for name, value in body.items():
            try:
                values[name] = readers[name](value)
            except BodyError as error:
                raise BodyError(f"{name}: {error}") from None
        try:
            return kind(**values)
        except ValueError as error:
            raise BodyError(str(error)) from None

    return read


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


def _items(read: Read, as_tuple: bool, value: Any) -> Any:
    if type(value) is not list and type(value) is not tuple:
        raise _wrong("a list", value)
    found = [read(one) for one in value]
    return tuple(found) if as_tuple else found


def _entries(key: Callable[[str], Any], read: Read, value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _wrong("an object", value)
    try:
        return {key(name): read(one) for name, one in value.items()}
    except BodyError:
        raise
    except ValueError:
        raise _wrong("an object whose keys are integers", value) from None


def _wrong(wanted: str, value: Any) -> BodyError:
    return BodyError(f"expected {wanted}, got {value!r:.{SHOWN}}")


# --- writing


@cache
def _writer(kind: Any) -> Write:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is bytes:
        return bytes.hex
    if origin in (Union, UnionType):
        write = _writer(_but_none(parts))
        return None if write is None else partial(_optional, write)
    if origin in (list, tuple, Sequence):
        write = _writer(parts[0])
        return None if write is None else partial(_written, write)
    if origin in (dict, Mapping):
        write = _writer(parts[1])
        return None if write is None and parts[0] is str else partial(_keyed, write or _anything)
    return _fields(kind) if is_dataclass(kind) else None


def _fields(kind: Any) -> Write:
    hints = get_type_hints(kind)
    writers = [(field.name, _writer(hints[field.name])) for field in fields(kind)]

    def write(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) if one is None else one(getattr(value, name)) for name, one in writers}

    return write


def _written(write: Read, values: Sequence[Any]) -> list[Any]:
    return [write(one) for one in values]


def _keyed(write: Read, values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): write(one) for name, one in values.items()}
