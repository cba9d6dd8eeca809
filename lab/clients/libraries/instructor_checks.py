"""instructor in its modes: constrained ones must fit, free ones must not fail a call."""

from __future__ import annotations

from typing import Any

from common import MESSAGES, City, Server


def instructor_constrained_modes(server: Server) -> None:
    """The server constrains the output, so it must fit."""
    import instructor

    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
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
    from instructor.core import IncompleteOutputException, InstructorRetryException

    for mode in ("JSON", "MD_JSON", "PARALLEL_TOOLS"):
        client = instructor.from_openai(server.openai(), mode=instructor.Mode[mode])
        wanted: Any = list[City] if mode == "PARALLEL_TOOLS" else City
        try:
            client.create(
                model=server.model, messages=MESSAGES, response_model=wanted, max_retries=1, max_tokens=64,
                temperature=0,
            )  # fmt: skip
        except (IncompleteOutputException, InstructorRetryException) as error:
            assert not isinstance(error.__cause__, openai.APIError), (mode, error)
        except (TypeError, ValueError, AttributeError) as error:
            assert mode == "PARALLEL_TOOLS", (mode, error)  # it does not expect an answer without calls


def instructor_partial(server: Server) -> None:
    import instructor

    client = instructor.from_openai(server.openai(), mode=instructor.Mode.TOOLS)
    *_, last = client.create_partial(model=server.model, messages=MESSAGES, response_model=City, max_tokens=128)
    assert isinstance(City.model_validate(last.model_dump()), City)
