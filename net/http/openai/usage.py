"""Token counts of one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from net.http.common.frontend import Output

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request: every prompt once, every choice's output."""

    n: int
    prompt_tokens: dict[int, int] = field(default_factory=dict)  # by prompt
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by prompt: of its first choice
    completion_tokens: int = 0
    dropped_experts: dict[int, int] = field(default_factory=dict)  # by choice

    def add(self, choice: int, output: Output) -> None:
        self.completion_tokens += len(output.token_ids)
        self.dropped_experts[choice] = output.num_dropped_experts
        self.prompt_tokens[choice // self.n] = output.num_prompt_tokens
        if choice % self.n == 0:
            self.cached_tokens[choice // self.n] = output.num_cached_tokens

    def json(self) -> Json:
        prompt_tokens = sum(self.prompt_tokens.values())
        dropped = sum(self.dropped_experts.values())
        counts: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }
        return counts | ({"dropped_experts": dropped} if dropped else {})
