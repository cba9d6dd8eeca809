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


@dataclass(slots=True)
class Counts:
    """The answers of a batch so far, and their tokens."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def answered(self) -> int:
        return self.completed + self.failed

    def add(self, ok: bool, usage: Mapping[str, Any]) -> None:
        """A line has been answered."""
        self.completed += ok
        self.failed += not ok
        self.input_tokens += int(usage.get("prompt_tokens", 0))
        self.output_tokens += int(usage.get("completion_tokens", 0))

    def usage(self) -> dict[str, int]:
        """As the API shows it."""
        total = self.input_tokens + self.output_tokens
        return {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens, "total_tokens": total}


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
    counts: Counts = field(default_factory=Counts)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None
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
            "request_counts": {
                "total": self.total,
                "completed": self.counts.completed,
                "failed": self.counts.failed,
            },
            "usage": self.counts.usage(),
            "metadata": self.metadata,
        }

    def kept(self) -> dict[str, Any]:
        """JSON-ready, for `of`."""
        fields = asdict(self)
        del fields["counts"]
        counts = {"completed": self.counts.completed, "failed": self.counts.failed, "usage": self.counts.usage()}
        return fields | counts

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Self:
        """Raises KeyError or TypeError for other fields."""
        fields = dict(kept)
        completed, failed, usage = (fields.pop(name) for name in ("completed", "failed", "usage"))
        return cls(**fields, counts=Counts(completed, failed, usage["input_tokens"], usage["output_tokens"]))
