"""The common parts of the checks of all libraries: the server, and a question with one certain answer.

The model is small, so a check relies on its words only where the answer is certain. An output that the server does not
constrain may be wrong; then the library must have found that out by itself, and no call may have failed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CITY_SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# All objects are closed, because a small model adds properties to an open one until its tokens are used up.


class Country(BaseModel, extra="forbid"):
    name: Literal["France", "Italy"]


class City(BaseModel, extra="forbid"):
    """A city. The model inside it gives the schema a definition with a reference."""

    name: Literal["Paris", "Rome"]
    country: Country
    inhabitants: Annotated[int, Field(ge=1000, le=9_999_999)]


class Weather(BaseModel, extra="forbid"):
    city: Literal["Oslo", "Rome"]


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Weather of a city."""
    return f"rain in {city}"


class Server:
    """The server under test."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.v1: Any = {"base_url": f"{url}/v1", "api_key": "none"}

    def openai(self, kind: str = "OpenAI") -> Any:
        import openai

        return getattr(openai, kind)(**self.v1, max_retries=0, timeout=120.0)
