"""Bodies of messages as dataclasses: checked when they are read, plain JSON on the wire. Pure.

The fields of the dataclass define the form: int, float, str, bool, bytes (as hex), each of them or None, lists, tuples
of a fixed length, dicts, and other dataclasses. A field with its default value is not sent. Reading is strict: fields
without a default must be present, unknown fields are errors, and the only conversion is from an integer to a float.
`__post_init__` checks what types cannot express, and raises ValueError.

A list of numbers, strings or booleans is checked without Python code per element. Messages about many things therefore
contain one such list per property.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from net.errors import RemoteError

T = TypeVar("T")
Read = Callable[[Any], Any]
Write = Callable[[Any], Any] | None
"""None: the value is its own JSON form."""

Buffer = bytes | bytearray | memoryview

SCALARS = (int, str, bool)
NUMBERS = frozenset((int, float))
SHOWN_CHARS = 40  # characters of a wrong value in an error
REQUIRED: Any = object()  # marks a field without a default


class BodyError(ValueError):
    """A body does not have the form of its kind of message."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """The body of a message that needs none: its kind and data are enough."""


def decode(kind: type[T], body: object) -> T:
    """`body`: parsed JSON. Raises BodyError naming the field."""
    form: Any = kind
    try:
        found: T = _reader(form)(body)
    except BodyError as error:
        raise BodyError(f"{kind.__name__}: {error}") from None
    return found


def answered(kind: type[T], body: object) -> T:
    """A peer's answer. Raises RemoteError if the answer is not of this kind."""
    try:
        return decode(kind, body)
    except BodyError as error:
        raise RemoteError(f"the answer does not have the expected form: {error}", "bad_answer") from None


def encode(value: Any) -> dict[str, Any]:
    """The JSON form of a dataclass, without fields that equal their defaults; its lists are not copied."""
    form: Any = type(value)
    write = _writer(form)
    assert write is not None, f"{form} is no dataclass"
    body: dict[str, Any] = write(value)
    return body


def typed(
    kind: type[T], handler: Callable[[str, T, memoryview], Awaitable[Any]]
) -> Callable[[str, dict[str, Any], memoryview], Awaitable[Any]]:
    """Converts a handler that takes `kind` and returns a dataclass, (dataclass, data) or None for Channel.handle. It
    raises BodyError for a body that is not of this kind; the channel then answers with the code bad_request."""

    async def handle(
        peer: str, body: dict[str, Any], data: memoryview
    ) -> dict[str, Any] | tuple[dict[str, Any], Sequence[Buffer]] | None:
        answer = await handler(peer, decode(kind, body), data)
        if type(answer) is tuple:
            return encode(answer[0]), answer[1]
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
    if origin is tuple and parts[-1] is not Ellipsis:
        return partial(_row, tuple(map(_reader, parts)), tuple)
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return partial(_row, tuple(map(_reader, get_type_hints(kind).values())), partial(_made, kind))
    if origin in (list, tuple, Sequence):
        if parts[0] in SCALARS:
            return partial(_scalars, parts[0], origin is tuple)
        if parts[0] is float:
            return partial(_numbers, origin is tuple)
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
    needed = {one.name: one for one in fields(kind) if _default(one) is REQUIRED}.keys()
    plain = {name: hint for name, hint in hints.items() if hint in (*SCALARS, float)}

    def read(body: Any) -> Any:
        if type(body) is not dict:
            raise _wrong("an object", body)
        values = body.copy()
        for name, value in body.items():
            # Most fields are their own JSON form and need no call.
            if plain.get(name) is (form := type(value)) and (form is not float or math.isfinite(value)):
                continue
            if (one := readers.get(name)) is None:
                raise BodyError(f"unknown field {name!r:.{SHOWN_CHARS}}")
            try:
                values[name] = one(value)
            except BodyError as error:
                raise BodyError(f"{name}: {error}") from None
        if not needed <= values.keys():
            raise BodyError(f"field {min(needed - values.keys())!r} is missing")
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
    return BodyError(f"expected {wanted}, got {value!r:.{SHOWN_CHARS}}")


# --- writing


@cache
def _writer(kind: Any) -> Write:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is bytes:
        return bytes.hex
    if origin in (Union, UnionType):
        write = _writer(_but_none(parts))
        return None if write is None else partial(_optional, write)
    if origin is tuple and parts[-1] is not Ellipsis:
        assert not any(map(_writer, parts)), f"no JSON form is known for {kind}"
        return None
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple: orjson does not write it as a list
        return list
    if origin in (list, tuple, Sequence):
        write = _writer(parts[0])
        return None if write is None else partial(_written, write)
    if origin in (dict, Mapping):
        write = _writer(parts[1])
        return None if write is None and parts[0] is str else partial(_keyed, write or _anything)
    return _fields(kind) if is_dataclass(kind) else None


def _fields(kind: Any) -> Write:
    hints = get_type_hints(kind)
    writers = [(field.name, _writer(hints[field.name]), _default(field)) for field in fields(kind)]

    def write(value: Any) -> dict[str, Any]:
        body = {}
        for name, one, default in writers:
            if (found := getattr(value, name)) is not default and (default is REQUIRED or found != default):
                body[name] = found if one is None else one(found)
        return body

    return write


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return REQUIRED if field.default_factory is MISSING else field.default_factory()


def _written(write: Read, values: Sequence[Any]) -> list[Any]:
    return [write(one) for one in values]


def _keyed(write: Read, values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): write(one) for name, one in values.items()}
