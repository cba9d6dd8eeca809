"""The state of one batch, as the API shows it. Pure: times are unix seconds given by the caller.

validating ─> in_progress ─> finalizing ─> completed
    │             ├─> cancelling ─> cancelled
    └─> failed    └─> expired
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

WINDOW_S = 24 * 3600
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""States in which a node works on the batch, also after a restart."""

STATES = (*OPEN, "completed", "failed", "expired", "cancelled")


def no_usage() -> dict[str, int]:
    return {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}


@dataclass(slots=True)
class Batch:
    """One batch; its fields are those of the API."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None  # lifetime of the output files
    status: str = "validating"
    at: dict[str, int] = field(default_factory=dict)  # state -> when it began
    expires_at: int = 0
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None
    usage: dict[str, int] = field(default_factory=no_usage)
    end: str = "completed"  # the state after finalizing

    def __post_init__(self) -> None:
        self.expires_at = self.expires_at or self.created_at + WINDOW_S

    @property
    def open(self) -> bool:
        return self.status in OPEN

    def move(self, status: str, now: int) -> None:
        """Enter a state. Raises ValueError for a state that does not exist, or out of a final one."""
        if status not in STATES or not self.open:
            raise ValueError(f"a batch that is {self.status} cannot become {status}")
        self.status = status
        self.at[status] = now

    def count(self, ok: bool, usage: Mapping[str, Any]) -> None:
        """A line has been answered."""
        self.completed += ok
        self.failed += not ok
        made, read = int(usage.get("completion_tokens", 0)), int(usage.get("prompt_tokens", 0))
        for name, tokens in (("input_tokens", read), ("output_tokens", made), ("total_tokens", read + made)):
            self.usage[name] += tokens

    def recount(self) -> None:
        """Forget all counts: a journal is read again."""
        self.completed = self.failed = 0
        self.usage = no_usage()

    def shown(self) -> dict[str, Any]:
        """The object of the API."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.at.get(name) for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage,
            "metadata": self.metadata,
        }

    def kept(self) -> dict[str, Any]:
        """JSON-ready, for `of`."""
        return asdict(self)

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Self:
        """Raises TypeError for other fields."""
        return cls(**kept)
