"""The bodies of /v1/batches, and the numbers in queries and forms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


def number_in(text: str, least: int, most: int) -> int | None:
    """The number that a client wrote; None if it is none from `least` to `most`."""
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
        return None
    return int(text)


class ExpiresAfter(BaseModel):
    """Lifetime of the output files."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchBody(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[Key, Value] | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None
