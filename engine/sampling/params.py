"""SamplingParams: how a request samples its tokens. TokenLogprobs: what it learns about a sampled token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


def _check(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when generation ends. Raises ValueError naming the field."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # control tokens have no text in the answer
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # the output consists of these; (): of all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output does not contain
    logprobs: int | None = None  # None: off; k: of the chosen token and the k best ones
    prompt_logprobs: int | None = None  # the same for every prompt token except the first, which has no context
    grammar: str = ""  # the output's grammar, compiled by engine/sampling/grammar.py; "": none

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens", self.min_tokens)
        for name in ("temperature", "presence_penalty", "frequency_penalty", "top_p", "min_p"):
            _check(math.isfinite(getattr(self, name)), name, "a finite number", getattr(self, name))
        _check(self.temperature >= 0, "temperature", "at least 0", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k >= -1, "top_k", "-1, 0 or positive", self.top_k)
        _check(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _check(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "positive",
            self.repetition_penalty,
        )
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or 0 <= count <= 20, name, "between 0 and 20", count)
        _check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer", self.seed)
        _check(
            all(isinstance(s, str) and s for s in self.stop),
            "stop",
            "one or more non-empty strings",
            self.stop,
        )

        if self.grammar:  # only the grammar decides where the output may end
            _check(self.min_tokens == 0, "min_tokens", "0 with structured output", self.min_tokens)
            _check(not self.ignore_eos, "ignore_eos", "false with structured output", self.ignore_eos)
            for name in ("allowed_token_ids", "bad_words"):
                _check(not getattr(self, name), name, "absent with structured output", len(getattr(self, name)))
        _check(all(self.bad_words), "bad_words", "words of at least one token", self.bad_words)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def has_rules(self) -> bool:
        """Whether anything may change the logits before a token is chosen."""
        banned = self.min_tokens > 0 or bool(self.bad_words) or bool(self.allowed_token_ids)
        return banned or bool(self.logit_bias) or self.has_penalty or bool(self.grammar)


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the chosen token's and the best `top`, best first."""

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)
    rank: int = 0  # of the chosen token: 1 + number of likelier tokens; 0: not requested
