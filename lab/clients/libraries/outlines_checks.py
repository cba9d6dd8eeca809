"""outlines: models, choices and expressions as output types."""

from __future__ import annotations

from typing import Literal

from common import QUESTION, City, Server


def outlines_types(server: Server) -> None:
    import outlines
    from outlines.types import Regex

    model = outlines.from_vllm(server.openai(), server.model)
    City.model_validate_json(model(QUESTION, City, max_tokens=128))
    assert model(QUESTION, Literal["Paris", "Rome"], max_tokens=8) in ("Paris", "Rome")
    assert model(QUESTION, Regex("(yes|no) [0-9]{3}"), max_tokens=12)[:3] in ("yes", "no ")
    assert "".join(model.stream(QUESTION, max_tokens=8))
    City.model_validate_json(outlines.from_openai(server.openai(), server.model)(QUESTION, City, max_tokens=128))
