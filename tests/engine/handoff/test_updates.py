"""What engine nodes tell acceptors: every update arrives as it was sent, a token costs few bytes, and nothing else is
taken for an update."""

from __future__ import annotations

from math import inf, nan

import orjson
import pytest

from engine.handoff.updates import (
    Failed,
    HandedOver,
    Landed,
    Report,
    Token,
    decode,
    decode_all,
    encode,
    encode_all,
    ends_there,
)
from engine.sampling.params import TokenLogprobs
from lab.fuzz.messages import BODIES, EVENT, REPORT, UPDATES
from net.bodies import BodyError
from net.bodies import decode as decode_body
from net.bodies import encode as encode_body


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: type(update).__name__)
def test_an_update_arrives_as_it_was_sent(update):
    wire = orjson.loads(orjson.dumps(encode("a/r#0", update)))
    assert decode(wire) == ("a/r#0", update)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_body_arrives_as_it_was_sent(body):
    assert decode_body(type(body), orjson.loads(orjson.dumps(encode_body(body)))) == body


def test_a_token_costs_no_more_bytes_than_its_numbers_and_its_request():
    """The form before had three nulls more. A step of 64 requests is one message."""
    batch = [(f"n1/cmpl-{i:032x}#0", Token(1000 + i, 49_000 + i)) for i in range(64)]
    before = {"items": [[name, token.index, token.token_id, None, None, None] for name, token in batch]}
    now = orjson.dumps(encode_all(batch))
    assert len(now) < len(orjson.dumps(before))
    assert len(now) <= 64 * (len(batch[0][0]) + len('["",1000,49000],')) + len('{"updates":[]}')
    one = batch[:1]
    assert len(orjson.dumps(encode_all(one))) < len(orjson.dumps({"items": before["items"][:1]}))


@pytest.mark.parametrize(
    "wire",
    [
        None, {}, [], ["a"], [1, 0, 5], ["a", True, 5], ["a", 0, False], ["a", 0, 5.0], ["a", -1, 5], ["a", 0, -5],
        ["a", 0], ["a", 0, 5, None], ["a", 0, 5, None, None, None, None], ["a", 0, 5, None, "abort", None],
        ["a", 0, None, None, None, None], ["a", 0, 5, [-1.0], None, None], ["a", 0, 5, [-1.0, [[1]]], None, None],
        ["a", 0, 5, ["x", []], None, None], ["a", 0, 5, [-1.0, [[1, -1.0, 0]]], None, None],
        ["a", 0, 5, None, None, [0]], ["a", 0, 5, None, None, [0, [{}]]], ["a", 0, 5, None, None, [None, []]],
        ["a", 0, 5, None, None, [0, [EVENT | {"more": 1}]]], ["a", 0, 5, None, None, [0, [EVENT | {"t": "now"}]]],
        ["a", "landed"], ["a", "landed", None], ["a", "handed_over", None], ["a", "failed"],
        ["a", "failed", None, None, False], ["a", "failed", "why", None], ["a", "failed", "why", None, 1],
        ["a", "refused", "why", 1.0, None, None], ["a", "refused", "why", -1.0, {}, None],
        ["a", "refused", "why", True, {}, None], ["a", "refused", "why", inf, {}, None],
        ["a", "refused", "why", nan, {}, None], ["a", "timed_out"], ["a", "closing"], ["a", None, 5], ["a", [], 5],
    ],
)  # fmt: skip
def test_nothing_else_is_an_update(wire):
    with pytest.raises(BodyError):
        decode(wire)


@pytest.mark.parametrize("body", [{}, {"updates": None}, {"updates": {}}, {"updates": [["a", 0, 5]], "more": 1}])
def test_a_message_of_tokens_has_a_list_of_updates_and_nothing_else(body):
    with pytest.raises(BodyError):
        decode_all(body)


def test_one_update_that_is_none_spoils_its_message():
    with pytest.raises(BodyError):
        decode_all({"updates": [["a", 0, 5], ["a", 1]]})


def test_what_is_impossible_travels_without_an_infinity():
    """JSON has none."""
    update = Token(0, 5, TokenLogprobs(-0.5, [(5, -0.5), (6, -inf)]))
    wire = orjson.loads(orjson.dumps(encode("a", update)))
    assert wire[3] == [-0.5, [[5, -0.5], [6, None]]]
    assert decode(wire) == ("a", update)


def test_which_updates_end_an_attempt_on_their_node():
    empty = Report(0, [])
    assert not any(map(ends_there, [Token(0, 5), Landed(empty), Token(0, 5, report=REPORT)]))
    assert all(map(ends_there, [Token(0, 5, finish="stop"), HandedOver(), Failed("x")]))
