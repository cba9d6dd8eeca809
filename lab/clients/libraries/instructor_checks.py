"""instructor in its modes: constrained ones must fit, free ones must not fail a call."""

from __future__ import annotations

from typing import Any

from common import MESSAGES, City, Server

CONSTRAINED = (
    "TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON_SCHEMA", "JSON_O1",
    "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS",
)  # fmt: skip
FREE = ("JSON", "MD_JSON", "PARALLEL_TOOLS")


def instructor_constrained_modes(server: Server) -> None:
    """The server constrains the output, so it must fit."""
    import instructor

    for mode in CONSTRAINED:
        client = instructor.from_openai(server.openai(), mode=instructor.Mode[mode])
        most = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": 256}
        asked: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_retries": 1} | most
        try:
            city = client.create(**asked, response_model=City)
        except Exception as error:
            raise AssertionError(f"{mode}: {error}") from error
        assert isinstance(city, City), (mode, city)


def instructor_free_modes(server: Server) -> None:
    """Only the prompt has the schema: a small model may miss it, but no call may fail."""
    import instructor
    import openai

    for mode in FREE:
        client = instructor.from_openai(server.openai(), mode=instructor.Mode[mode])
        _ask_freely(client, mode, server.model, openai.APIError, temperature=0)


def instructor_modes_of_anthropic(server: Server) -> None:
    """Its three modes on /v1/messages; only a forced tool is constrained."""
    import anthropic
    import instructor

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120.0)
    forced = instructor.from_anthropic(client, mode=instructor.Mode.TOOLS)
    city = forced.create(model=server.model, messages=MESSAGES, response_model=City, max_tokens=256, max_retries=1)
    assert isinstance(city, City), city
    for mode in ("JSON", "PARALLEL_TOOLS"):
        _ask_freely(
            instructor.from_anthropic(client, mode=instructor.Mode[mode]), mode, server.model, anthropic.APIError
        )


def instructor_partial(server: Server) -> None:
    import instructor

    client = instructor.from_openai(server.openai(), mode=instructor.Mode.TOOLS)
    *_, last = client.create_partial(model=server.model, messages=MESSAGES, response_model=City, max_tokens=128)
    assert isinstance(City.model_validate(last.model_dump()), City)


def _ask_freely(client: Any, mode: str, model: str, call_error: type[Exception], **more: Any) -> None:
    """The answer may have any form, but it must be an answer."""
    from instructor.core import IncompleteOutputException, InstructorRetryException

    wanted: Any = list[City] if mode == "PARALLEL_TOOLS" else City
    try:
        client.create(model=model, messages=MESSAGES, response_model=wanted, max_retries=1, max_tokens=64, **more)
    except (IncompleteOutputException, InstructorRetryException) as error:
        assert not isinstance(error.__cause__, call_error), (mode, error)
    except (TypeError, ValueError, AttributeError) as error:
        assert mode == "PARALLEL_TOOLS", (mode, error)  # it does not expect an answer without calls
