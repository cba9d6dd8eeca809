"""The bodies of /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


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
