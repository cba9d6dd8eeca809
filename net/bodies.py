"""Bodies of messages as dataclasses: checked when they are read, plain JSON on the wire. Pure.

The fields of the dataclass define the form: int, float, str, bool, bytes (as hex), each of them or None, lists, tuples
of a fixed length, dicts, and other dataclasses. A field with its default value is not sent. Reading is strict: fields
without a default must be present, unknown fields are errors, and the only conversion is from an integer to a float.
`__post_init__` checks what types cannot express, and raises ValueError.

A list of numbers, strings or booleans is checked without Python code per element. Messages about many things therefore
contain one such list per property.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from net.body_readers import BodyError, reader
from net.body_writers import writer
from net.errors import RemoteError

__all__ = ["BodyError", "Nothing", "answered", "decode", "encode", "typed"]

T = TypeVar("T")

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Nothing:
    """The body of a message that needs none: its kind and data are enough."""


def decode(kind: type[T], body: object) -> T:
    """`body`: parsed JSON. Raises BodyError naming the field."""
    form: Any = kind
    try:
        found: T = reader(form)(body)
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
    write = writer(form)
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
