"""Echo with log probabilities: what lm-eval and others read to score a text."""

from __future__ import annotations

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.http.openai.logprobs import TextOffsets
from tests.net.fake_frontend import FakeFrontend, serving


@pytest.fixture
async def client():
    async with (
        serving(FakeFrontend()) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_echo_scores_the_prompt_before_the_output(client):
    answer = await client.completions.create(model="fake", prompt="xyz", max_tokens=2, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert choice.text == "xyzxy"
    logprobs = choice.logprobs
    assert logprobs.tokens == ["x", "y", "z", "x", "y"]
    assert logprobs.token_logprobs == [None, -1.0, -2.0, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs == [
        None,
        {"A": -0.25, "y": -1.0},
        {"A": -0.25, "z": -2.0},
        {"x": -0.5},
        {"y": -0.5},
    ]


async def test_no_token_at_all_is_wanted(client):
    answer = await client.completions.create(
        model="fake", prompt=[[120, 121], [122]], max_tokens=0, logprobs=0, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["xy", "z"]
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [[None, -1.0], [None]]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    plain = await client.completions.create(model="fake", prompt="xyz", max_tokens=0, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("xyz", None)
    with pytest.raises(openai.BadRequestError, match="max_tokens: 0 returns only the prompt; send echo: true"):
        await client.completions.create(model="fake", prompt="xyz", max_tokens=0)


async def test_a_stream_begins_with_the_prompt(client):
    stream = await client.completions.create(
        model="fake", prompt="ab", max_tokens=2, logprobs=1, echo=True, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [chunk.text for chunk in chunks] == ["aba", "b"]
    assert [chunk.logprobs.tokens for chunk in chunks] == [["a", "b", "a"], ["b"]]
    assert [chunk.logprobs.text_offset for chunk in chunks] == [[0, 1, 2], [3]]
    alone = await client.completions.create(model="fake", prompt="ab", max_tokens=0, logprobs=1, echo=True, stream=True)
    assert [(chunk.choices[0].text, chunk.choices[0].finish_reason) async for chunk in alone] == [("ab", "length")]


async def test_without_echo_nothing_of_the_prompt_is_asked_for(client):
    answer = await client.completions.create(model="fake", prompt="xyz", max_tokens=1, logprobs=1)
    assert answer.choices[0].logprobs.tokens == ["x"]


def of(token: str, logprob: float, rank: int) -> dict:
    return {str(ord(token)): {"logprob": logprob, "rank": rank, "decoded_token": token}}


async def test_prompt_logprobs_as_vllm_shows_them(client):
    """The fake's: the i-th token has -i and is the second best, behind A; ranks are those of the places."""
    answer = await client.completions.create(
        model="fake", prompt=["xy", "z"], n=2, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    told = [None, of("y", -1.0, 2) | of("A", -0.25, 1)]
    assert [choice.prompt_logprobs for choice in answer.choices] == [told, told, [None], [None]]
    assert [choice.logprobs for choice in answer.choices] == [None] * 4
    alone = await client.completions.create(model="fake", prompt="xy", extra_body={"prompt_logprobs": 0})
    assert alone.choices[0].prompt_logprobs == [None, of("y", -1.0, 7)], "the rank that the engine counted"
    both = await client.completions.create(
        model="fake", prompt="xy", max_tokens=0, echo=True, logprobs=1, extra_body={"prompt_logprobs": 0}
    )
    assert both.choices[0].logprobs.top_logprobs == [None, {"A": -0.25, "y": -1.0}]
    assert both.choices[0].prompt_logprobs == alone.choices[0].prompt_logprobs
    plain = await client.completions.create(model="fake", prompt="xy")
    assert "prompt_logprobs" not in plain.choices[0].model_dump()


async def test_prompt_logprobs_of_a_chat_stand_next_to_its_choices(client):
    messages = [{"role": "user", "content": "xy"}]
    answer = await client.chat.completions.create(
        model="fake", messages=messages, n=2, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    assert answer.prompt_logprobs == [None, of("y", -1.0, 7) | of("A", -0.25, 1)]
    assert len(answer.choices) == 2
    for wrong, reason in (({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": 1}, "leave stream out")):
        with pytest.raises(openai.BadRequestError, match=reason):
            await client.chat.completions.create(
                model="fake", messages=messages, stream=wrong["prompt_logprobs"] == 1, extra_body=wrong
            )


async def test_parts_of_a_character_have_its_place(client):
    answer = await client.completions.create(model="fake", prompt="é!", max_tokens=3, logprobs=0, echo=True)
    assert answer.choices[0].text == "é!é!"
    assert answer.choices[0].logprobs.text_offset == [0, 0, 1, 2, 2, 3]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.data())
def test_offsets_point_at_the_text_however_it_is_cut(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=6))) if len(raw) > 1 else []
    tokens = [raw[i:j] for i, j in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    prompt, output = TextOffsets(text), TextOffsets("")
    at = 0
    for token in tokens:
        begun = len(raw[:at].decode(errors="ignore").encode())  # where the character begins that the token begins in
        expected = len(raw[:begun].decode())
        assert prompt.of_prompt(token) == output.of_output(token) == (expected if token else len(text))
        at += len(token)
    assert prompt.of_output(b"x") == len(text)


def test_tokens_that_are_not_in_the_text_have_no_width():
    offsets = TextOffsets("Hello you")
    assert [offsets.of_prompt(raw) for raw in (b"<s>", b" Hello", b" you", b"</s>")] == [0, 0, 5, 9]
    assert offsets.of_output(b"!") == 9
    lost = TextOffsets("a\x04é\x06b")  # two characters that the vocabulary does not have
    assert [lost.of_prompt(raw) for raw in (b"a", "é".encode(), b"b")] == [0, 2, 4]
    given = TextOffsets("<s>Hello")  # from token ids: special ones are part of the text
    assert [given.of_prompt(raw) for raw in (b"<s>", b"Hello")] == [0, 3]
