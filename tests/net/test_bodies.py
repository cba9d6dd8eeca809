"""Bodies of messages: what is read is what was written, and nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
import pytest

from net.bodies import BodyError, decode, encode, typed
from net.errors import RemoteError
from tests.net.peers import channels


@dataclass(frozen=True, slots=True)
class Part:
    key: bytes
    weights: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.key) > 4:
            raise ValueError("key must have at most 4 bytes")


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    count: int
    share: float
    last: bool
    parts: Sequence[Part]
    words: tuple[str, ...] = ()
    by_name: dict[str, Part] = field(default_factory=dict)
    one: Part | None = None
    rest: Any = None


WHOLE = Whole("n", 3, 0.5, True, [Part(b"\x01"), Part(b"", {-2: 1.5})], ("a",), {"x": Part(b"z")}, Part(b"y"), [1, {}])
BODY = orjson.loads(orjson.dumps(encode(WHOLE)))


def test_what_is_read_is_what_was_written():
    assert decode(Whole, BODY) == WHOLE
    assert BODY["parts"][1] == {"key": "", "weights": {"-2": 1.5}}
    least = {"name": "n", "count": 3, "share": 1, "last": False, "parts": []}
    assert decode(Whole, least) == Whole("n", 3, 1.0, False, [])
    assert type(decode(Whole, least).share) is float


@pytest.mark.parametrize("wrong", ["count", "share", "words", "by_name"])
def test_a_deep_value_is_wrong_like_any_other(wrong):
    """JSON may be deeper than Python's text of it."""
    deep = orjson.loads(b'[{"a":' * 500 + b"1" + b"}]" * 500)
    with pytest.raises(BodyError, match=r"got a list of 1|got an object of 1"):
        decode(Whole, BODY | {wrong: deep})


def test_an_error_shows_no_more_than_the_size_of_a_list():
    class Watched(list):
        def __repr__(self) -> str:
            raise AssertionError("millions of elements take seconds")

    with pytest.raises(BodyError, match=r"count: expected int, got a list of 3$"):
        decode(Whole, BODY | {"count": Watched([1, 2, 3])})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": True}, "Whole: count: expected int, got True"),
        ({"count": 1.0}, "count: expected int, got 1.0"),
        ({"count": None}, "count: expected int, got None"),
        ({"share": "1"}, "share: expected a finite number, got '1'"),
        ({"share": False}, "share: expected a finite number, got False"),
        ({"last": 1}, "last: expected bool, got 1"),
        ({"name": 5}, "name: expected str, got 5"),
        ({"parts": {}}, "parts: expected a list"),
        ({"parts": [[]]}, "parts: expected an object"),
        ({"words": ["a", 1]}, "words: expected str, got 1"),
        ({"one": {"key": "xy"}}, "one: key: expected hexadecimal digits, got 'xy'"),
        ({"one": {"key": 7}}, "one: key: expected hexadecimal digits, got 7"),
        ({"one": {"key": "00", "weights": {"a": 1}}}, "weights: expected an object whose keys are integers"),
        ({"one": {"key": "0000000000"}}, "one: key must have at most 4 bytes"),
        ({"one": {}}, "one: field 'key' is missing"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_anything_else_is_refused_by_name(change, said):
    with pytest.raises(BodyError) as caught:
        decode(Whole, BODY | change)
    assert said in str(caught.value)


class Price(NamedTuple):
    fixed_s: float
    block_s: float


FREE = Price(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Columns:
    sums: Sequence[int]
    costs: Sequence[float] = ()
    price: Price = FREE
    pairs: Sequence[tuple[int, str]] = ()
    part: Part = field(default_factory=lambda: Part(b""))


def test_columns_rows_and_named_tuples_travel_as_lists():
    columns = Columns([2**64 - 1, -1], [1.5], Price(0.5, 1.0), [(1, "a")], Part(b"x"))
    body = orjson.loads(orjson.dumps(encode(columns)))
    assert (body["price"], body["pairs"]) == ([0.5, 1.0], [[1, "a"]])
    assert decode(Columns, body) == columns
    read = decode(Columns, {"sums": [], "costs": [1, 2.5], "price": [1, 2]})
    assert [*map(type, (*read.costs, *read.price))] == [float] * 4


def test_a_field_with_its_default_does_not_travel():
    assert encode(Columns([1])) == {"sums": [1]}
    assert encode(Columns([1], part=Part(b""), price=Price(0.0, 0.0))) == {"sums": [1]}
    assert encode(Columns([1], part=Part(b"y"))) == {"sums": [1], "part": {"key": "79"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sums": [1, True]}, "sums: expected int, got True"),
        ({"sums": [1, 2.0]}, "sums: expected int, got 2.0"),
        ({"sums": "12"}, "sums: expected a list"),
        ({"costs": [1.0, "2"]}, "costs: expected finite numbers"),
        ({"costs": [1.0, True]}, "costs: expected finite numbers"),
        ({"costs": [float("inf")]}, "costs: expected finite numbers"),
        ({"price": [1.0]}, "price: expected a list of 2"),
        ({"price": {"fixed_s": 1.0, "block_s": 1.0}}, "price: expected a list"),
        ({"pairs": [[1, "a", "b"]]}, "pairs: expected a list of 2"),
        ({"pairs": [["a", 1]]}, "pairs: expected int, got 'a'"),
    ],
)
def test_wrong_columns_and_rows_are_refused_by_name(change, said):
    with pytest.raises(BodyError) as caught:
        decode(Columns, {"sums": [1]} | change)
    assert said in str(caught.value)


@pytest.mark.parametrize("body", [None, [], "x", 3, {}])
def test_a_body_is_an_object_with_its_fields(body):
    with pytest.raises(BodyError):
        decode(Whole, body)


def test_an_error_does_not_repeat_a_long_value():
    with pytest.raises(BodyError) as caught:
        decode(Whole, BODY | {"name": ["x" * 10_000]})
    assert len(str(caught.value)) < 200


def test_a_type_without_a_form_is_found_when_it_is_first_used():
    @dataclass
    class Odd:
        when: complex

    with pytest.raises(TypeError, match="no JSON form"):
        decode(Odd, {"when": 1})


async def test_a_handler_gets_the_dataclass_and_a_stranger_the_reason():
    async def double(peer: str, part: Part, data: memoryview) -> Part:
        assert isinstance(part, Part)
        return Part(part.key * 2)

    async with channels("a", "b") as (a, b):
        b.handle("double", typed(Part, double))
        reply, _ = await a.call("b", "double", encode(Part(b"ab")))
        assert decode(Part, reply) == Part(b"abab")
        with pytest.raises(RemoteError, match="Part: field 'key' is missing") as caught:
            await a.call("b", "double", {})
        assert caught.value.code == "bad_request"


async def test_a_handler_may_answer_with_data():
    async def with_data(peer: str, part: Part, data: memoryview) -> tuple[Part, list[bytes]]:
        return part, [b"da", b"ta"]

    async with channels("a", "b") as (a, b):
        b.handle("both", typed(Part, with_data))
        reply, data = await a.call("b", "both", encode(Part(b"ab")))
        assert decode(Part, reply) == Part(b"ab") and bytes(data) == b"data"
