"""The two bodies between an acceptor and a worker, and the addresses of workers."""

from __future__ import annotations

import json
import math

import orjson
import pytest

from engine.backends.answer import Answer, AnswerError
from engine.backends.question import Forwarded, question
from engine.config.backend_address import Address, addresses
from engine.handoff.updates import Ended, Token
from engine.sampling.params import SamplingParams, TokenLogprobs


def asked(**sampling):
    return question("m", [1, 2, 3, 4, 5], 3, SamplingParams(max_tokens=10, **sampling), None)


def test_a_plain_question():
    assert asked(temperature=0.0) == {
        "model": "m",
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_what_the_client_chose_is_forwarded():
    grammar = Forwarded().compile("json", '{"type": "object"}')
    body = asked(top_p=0.5, seed=3, logit_bias={7: 1.5}, stop=("x",), stop_token_ids=(9,), logprobs=2)
    assert (body["top_p"], body["seed"], body["logit_bias"], body["stop_token_ids"]) == (0.5, 3, {"7": 1.5}, [9])
    assert body["logprobs"] == 2 and body["return_tokens_as_token_ids"] is True
    assert "stop" not in body
    assert asked(min_tokens=5)["min_tokens"] == 3
    assert asked(grammar=grammar)["structured_outputs"] == {"json": {"type": "object"}}
    assert question("m", [1], 1, SamplingParams(), b"s" * 16)["cache_salt"] == "73" * 16


def test_what_workers_cannot_do():
    with pytest.raises(ValueError, match="bad_words"):
        asked(bad_words=((1,),))
    with pytest.raises(ValueError, match="prompt_logprobs"):
        asked(prompt_logprobs=1)
    with pytest.raises(ValueError, match="tool_choice"):
        Forwarded().compile("call", "{}")


def line(**choice):
    return b"data: " + orjson.dumps({"choices": [{"index": 0, "text": "x", **choice}]})


def test_tokens_of_a_stream():
    answer = Answer(4)
    assert list(answer.line(b": comment")) == [] == list(answer.line(b""))
    assert list(answer.line(line(token_ids=[5, 6]))) == [Token(4, 5), Token(5, 6)]
    assert list(answer.line(line(token_ids=[7], finish_reason="stop"))) == [Token(6, 7, None, "stop")]
    assert answer.finished and not answer.done
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    assert list(answer.line(b"data: " + json.dumps(usage).encode())) == []
    assert list(answer.line(b"data: [DONE]")) == []
    assert answer.done and answer.cached_tokens == 3


def test_an_end_without_a_token():
    assert list(Answer(0).line(line(token_ids=[], text="", finish_reason="length"))) == [Ended("length")]


def test_log_probabilities_by_token_id():
    found = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:9": -2.0, "token_id:5": -0.5, "token_id:3": None}]}
    (token,) = Answer(0).line(line(token_ids=[5], logprobs=found))
    assert token.logprobs == TokenLogprobs(-0.5, [(5, -0.5), (9, -2.0), (3, -math.inf)])


@pytest.mark.parametrize(
    "wrong",
    [
        b"data: {",
        b"data: 5",
        b'data: {"error": {"message": "no"}}',
        line(),
        line(token_ids=[1], finish_reason="abort"),
        line(token_ids=[1], logprobs={"token_logprobs": [-1.0], "top_logprobs": [{"the": -1.0}]}),
        line(token_ids=[1], logprobs={"token_logprobs": [], "top_logprobs": None}),
    ],
)
def test_other_lines_are_errors(wrong):
    with pytest.raises(AnswerError):
        list(Answer(0).line(wrong))


def test_addresses():
    text = "http://a:1/ http://b:2,events=tcp://b:3,replay=tcp://b:4"
    assert addresses(text) == [Address("http://a:1"), Address("http://b:2", "tcp://b:3", "tcp://b:4")]
    assert [one.name for one in addresses(text)] == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a:1", "http://HOST"),
        ("http://a:1/v1", "http://HOST"),
        ("http://a:1 http://a:1", "twice"),
        ("http://a:1,replay=tcp://a:2", "events="),
        ("http://a:1,events=a:2", "events=tcp"),
        ("http://a:1,other=tcp://a:2", "other"),
    ],
)
def test_wrong_addresses(text, names):
    with pytest.raises(ValueError, match=names):
        addresses(text)
