"""best_of: the answer has the n draws with the highest mean log probability, best first."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from net.http import LogprobItem, Output
from tests.net.fake_frontend import FakeFrontend, serving

MEANS = (-2.0, -0.5, -3.0, -0.25)
"""Mean log probability by draw."""


class Draws(FakeFrontend):
    """Draw i has i + 1 tokens of the letter 'a' + i, and the mean log probability MEANS[i]."""

    async def _generate(self, prompt: list[int], sampling: dict[str, Any]) -> AsyncGenerator[Output, None]:
        draw = sampling["seed"] - 7
        token, tokens = 97 + draw, draw + 1
        for position in range(tokens):
            items = None
            if sampling["logprobs"] is not None:
                off = 0.125 * (1 if position % 2 else -1) if tokens % 2 == 0 else 0.0  # the mean stays the same
                items = [LogprobItem(token, MEANS[draw] + off, [(token, MEANS[draw])])]
            of_prompt = None
            if position == 0 and sampling.get("prompt_logprobs") is not None:
                of_prompt = [LogprobItem(one, -1.0, [(one, -1.0)]) for one in prompt][1:]
            reason = "stop" if position == draw else None
            yield Output(chr(token), [token], items, reason, len(prompt), draw, None, of_prompt)


@pytest.fixture
async def frontend():
    return Draws()


@pytest.fixture
async def client(frontend):
    async with (
        serving(frontend) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_the_best_two_of_four(client, frontend):
    answer = await client.completions.create(model="fake", prompt="xy", max_tokens=9, n=2, best_of=4, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "dddd"), (1, "bb")]
    assert all(choice.logprobs is None for choice in answer.choices), "the client did not ask for them"
    assert [call["sampling"]["seed"] for call in frontend.calls] == [7, 8, 9, 10]
    assert answer.usage.completion_tokens == 6, "the tokens of the answer"
    assert answer.usage.prompt_tokens == 2 and answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_every_prompt_has_its_best(client, frontend):
    answer = await client.completions.create(
        model="fake", prompt=["xy", "z"], max_tokens=9, best_of=2, seed=7, logprobs=0
    )
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "bb"), (1, "bb")]
    assert [choice.logprobs.token_logprobs for choice in answer.choices] == [[-0.625, -0.375]] * 2
    assert len(frontend.calls) == 4


async def test_the_first_draw_alone_computes_log_probabilities_of_the_prompt(client, frontend):
    answer = await client.completions.create(
        model="fake", prompt="xyz", max_tokens=9, best_of=3, seed=7, echo=True, logprobs=0
    )
    assert answer.choices[0].text == "xyzbb"
    assert answer.choices[0].logprobs.token_logprobs == [None, -1.0, -1.0, -0.625, -0.375]
    assert ["prompt_logprobs" in call["sampling"] for call in frontend.calls] == [True, False, False]


async def test_a_chat(client):
    messages = [{"role": "user", "content": "hello"}]
    answer = await client.chat.completions.create(
        model="fake", messages=messages, seed=7, extra_body={"best_of": 4}, max_tokens=9
    )
    assert [choice.message.content for choice in answer.choices] == ["dddd"]


async def test_as_many_draws_as_choices_need_no_comparison(client, frontend):
    answer = await client.completions.create(model="fake", prompt="xy", max_tokens=9, n=2, best_of=2, seed=7)
    assert [choice.text for choice in answer.choices] == ["a", "bb"]
    assert [call["sampling"]["logprobs"] for call in frontend.calls] == [None, None]
