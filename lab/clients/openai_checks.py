"""Typical calls of an application with the openai package, run by the interpreter of a virtual environment that has it.

python openai_checks.py URL MODEL prints one JSON line for each check: {"check", "error"}; error is null if the check
passed. It imports none of our modules.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    inhabitants: Annotated[int, Field(ge=1000, le=9_999_999)]


class Checks:
    """One method each; a check fails by raising."""

    def __init__(self, url: str, model: str) -> None:
        self.options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120.0}
        self.model = model
        self.client = openai.OpenAI(**self.options)

    def chat(self, **body: Any) -> Any:
        body = {"model": self.model, "messages": QUESTION, "temperature": 0, "max_tokens": 12} | body
        return self.client.chat.completions.create(**body)

    def models(self) -> None:
        assert [model.id for model in self.client.models.list()] == [self.model]
        assert self.client.models.retrieve(self.model).id == self.model

    def sync_chat(self) -> None:
        answer = self.chat()
        assert "Paris" in answer.choices[0].message.content, answer
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    def chat_stream(self) -> None:
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == self.chat().choices[0].message.content
        assert chunks[-1].usage.completion_tokens > 0
        again = self.chat(stream=True, stream_options={"include_usage": True}, max_tokens=1)
        assert list(again)[-1].usage.prompt_tokens_details.cached_tokens > 0, "the same prompt came before"

    def chat_stream_helper(self) -> None:
        with self.client.chat.completions.stream(model=self.model, messages=QUESTION, max_tokens=8) as stream:
            kinds = {event.type for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds

    def async_client(self) -> None:
        async def ask() -> list[str | None]:
            async with openai.AsyncOpenAI(**self.options) as client:
                body: Any = {"model": self.model, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
                whole = await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(3)))
                stream = await client.chat.completions.create(**body, stream=True)
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                return [answer.choices[0].message.content for answer in whole] + ["".join(pieces)]

        assert len(set(asyncio.run(ask()))) == 1

    def raw_response_has_the_request_id(self) -> None:
        raw = self.client.chat.completions.with_raw_response.create(
            model=self.model, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "stock-1"}
        )
        assert raw.headers["x-request-id"] == "stock-1" and raw.parse()._request_id == "stock-1"

    def forced_tool(self) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = self.chat(tools=[WEATHER], tool_choice=choice, max_tokens=64)
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
            assert answer.choices[0].finish_reason == "tool_calls"

    def tool_round_trip(self) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        assert self.chat(messages=messages, tools=[WEATHER], tool_choice="auto").choices[0].finish_reason

    def tool_stream(self) -> None:
        chunks = self.chat(tools=[WEATHER], tool_choice="required", max_tokens=64, stream=True)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(call.function.name or "" for call in calls) == "weather"
        assert json.loads("".join(call.function.arguments or "" for call in calls))["city"] in ("Oslo", "Rome")

    def parsed_model(self) -> None:
        answer = self.client.chat.completions.parse(
            model=self.model, messages=QUESTION, response_format=City, temperature=0, max_tokens=64
        )
        assert isinstance(answer.choices[0].message.parsed, City), answer

    def json_object(self) -> None:
        (choice,) = self.chat(response_format={"type": "json_object"}, max_tokens=24).choices
        assert choice.message.content.lstrip().startswith("{"), choice
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict), choice

    def regex(self) -> None:
        answer = self.chat(extra_body={"structured_outputs": {"regex": "(yes|no) [0-9]{3}"}})
        assert answer.choices[0].message.content[:3] in ("yes", "no "), answer

    def chat_logprobs(self) -> None:
        (choice,) = self.chat(logprobs=True, top_logprobs=3, max_tokens=4).choices
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob <= 0
        said = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert said.decode() == choice.message.content

    def completion_n_and_logprobs(self) -> None:
        answer: Any = self.client.completions.create(
            model=self.model, prompt="Once upon a time", max_tokens=4, n=2, seed=7, logprobs=2, stop=["zzz"]
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert all(len(choice.logprobs.tokens) == 4 for choice in answer.choices)

    def echo_with_logprobs(self) -> None:
        text = "The capital of France is Paris"
        answer: Any = self.client.completions.create(model=self.model, prompt=text, max_tokens=0, echo=True, logprobs=1)
        (choice,) = answer.choices
        logprobs = choice.logprobs
        assert choice.text == text == "".join(logprobs.tokens)
        assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
        pairs = zip(logprobs.text_offset, logprobs.tokens, strict=True)
        assert all(text[at:].startswith(token) for at, token in pairs), logprobs
        assert logprobs.token_logprobs[-1] > -3, "the model knows the capital of France"
        asked: Any = {"model": self.model, "prompt": text, "max_tokens": 1, "extra_body": {"prompt_logprobs": 2}}
        first, *rows = self.client.completions.create(**asked).choices[0].prompt_logprobs
        own = [next(iter(row.values())) for row in rows]
        assert first is None and [row["decoded_token"] for row in own] == logprobs.tokens[1:]
        assert all(
            abs(row["logprob"] - other) < 0.2 for row, other in zip(own, logprobs.token_logprobs[1:], strict=True)
        )
        assert all(sorted(entry["rank"] for entry in row.values())[:2] == [1, 2] for row in rows), rows

    def completion_stream(self) -> None:
        stream = self.client.completions.create(
            model=self.model, prompt=["One, two,", "Red, green,"], max_tokens=4, temperature=0, stream=True
        )
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert all(texts), texts

    def errors(self) -> None:
        cases: Any = (
            ({"model": "nobody"}, openai.NotFoundError),
            ({"temperature": -1}, openai.BadRequestError),
            ({"max_tokens": 10**6}, openai.BadRequestError),
            ({"extra_body": {"logit_bias": [1]}}, openai.BadRequestError),
        )
        for wrong, kind in cases:
            try:
                self.chat(**wrong)
            except kind as error:
                assert error.body and error.body["message"], error
            else:
                raise AssertionError(f"{wrong} was accepted")

    def suffix_and_embeddings_are_refused(self) -> None:
        calls: list[Callable[[], Any]] = [
            lambda: self.client.completions.create(model=self.model, prompt="a", suffix="b"),
            lambda: self.client.embeddings.create(model=self.model, input="a"),
        ]
        for call in calls:
            try:
                call()
            except openai.BadRequestError as error:
                assert "suffix" in str(error) or "embeddings" in str(error)
            else:
                raise AssertionError("accepted")


CHECKS = [name for name in vars(Checks) if not name.startswith("_") and name != "chat"]


def main(url: str, model: str) -> int:
    checks = Checks(url, model)
    failed = 0
    for name in CHECKS:
        error = None
        try:
            getattr(checks, name)()
        except Exception:
            error = traceback.format_exc(limit=-2)
            failed += 1
        print(json.dumps({"check": name, "error": error}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
