"""Log probabilities in the format of /v1/completions: four lists over the tokens of a choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from net.http.common.frontend import Frontend, LogprobItem

MIN_LOGPROB = -9999.0
"""OpenAI's value for 'very unlikely', because JSON has no -inf."""


LOST_BYTES_MAX = 8
"""Bytes of a text that may be missing between two tokens: vocabularies do not contain all bytes."""


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class TextOffsets:
    """Positions in characters where the tokens of a choice begin in its text. A token that begins inside the UTF-8 form
    of a character has that character's position."""

    def __init__(self, echo: str) -> None:
        """echo: the text of the prompt if the choice's text begins with it; else empty."""
        self._echo = echo.encode("utf-8", "surrogatepass")
        self._passed = 0  # bytes of the echo that belong to earlier tokens
        self._prompt_at = 0
        self._output_at = len(echo)

    def of_prompt(self, raw: bytes) -> int:
        """Position of the prompt's next token, given its bytes. A token that is not in the text, such as a BOS that the
        tokenizer added, has no width."""
        if not self._passed and not self._echo.startswith(raw):
            raw = raw.removeprefix(b" ")  # SentencePiece adds a space before the first word
        begin = self._echo.find(raw, self._passed, self._passed + LOST_BYTES_MAX + len(raw))
        if begin < 0:
            return self._prompt_at
        _, self._prompt_at = _step(self._prompt_at, self._echo[self._passed : begin])
        self._passed = begin + len(raw)
        at, self._prompt_at = _step(self._prompt_at, raw)
        return at

    def of_output(self, raw: bytes) -> int:
        """Position of the next generated token."""
        at, self._output_at = _step(self._output_at, raw)
        return at


def _step(at: int, raw: bytes) -> tuple[int, int]:
    """(begin of this token, begin of the next one) if `at` characters began before it."""
    inside = bool(raw) and _continues(raw[0])
    return max(0, at - inside), at + sum(not _continues(byte) for byte in raw)


def _continues(byte: int) -> bool:
    """Whether `byte` continues a character."""
    return byte & 0xC0 == 0x80


def prompt_logprobs(
    frontend: Frontend, items: Sequence[LogprobItem], wanted: int
) -> Iterator[dict[str, dict[str, Any]] | None]:
    """vLLM's format: per prompt token {token id: {logprob, rank, decoded_token}} of the token itself and of the
    `wanted` best; None for the first token. `items`: all prompt tokens except the first."""

    def described(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": frontend.token_text(token_id)}

    yield None
    for item in items:
        best = {str(one): described(one, logprob, at) for at, (one, logprob) in enumerate(item.top[:wanted], 1)}
        yield {str(item.token_id): described(item.token_id, item.logprob, item.rank)} | best


class CompletionLogprobs:
    """The log probabilities of one choice, rendered as its outputs arrive."""

    def __init__(self, frontend: Frontend, wanted: int, prompt: list[int], echo: str) -> None:
        """wanted: number of best alternatives per token; prompt: its token ids."""
        self._frontend = frontend
        self._wanted = wanted
        self._prompt = prompt
        self._offsets = TextOffsets(echo)

    def render(self, of_prompt: Sequence[LogprobItem] | None, of_output: list[LogprobItem]) -> dict[str, list[Any]]:
        """of_prompt: all prompt tokens except the first, which has no context; None: not included here."""
        columns: list[tuple[str, float | None, dict[str, float] | None, int]] = []
        if of_prompt is not None:
            text, raw = self._token(self._prompt[0])
            columns.append((text, None, None, self._offsets.of_prompt(raw)))
            for item in of_prompt:
                text, raw = self._token(item.token_id)
                columns.append((text, finite(item.logprob), self._top(text, item), self._offsets.of_prompt(raw)))
        for item in of_output:
            text, raw = self._token(item.token_id)
            columns.append((text, finite(item.logprob), self._top(text, item), self._offsets.of_output(raw)))
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [column[i] for column in columns] for i, name in enumerate(names)}

    def _token(self, token_id: int) -> tuple[str, bytes]:
        return self._frontend.token_text(token_id), self._frontend.token_bytes(token_id)

    def _top(self, text: str, item: LogprobItem) -> dict[str, float]:
        """By text. If two ids have the same text, the likelier one counts; the token itself is always included."""
        text_of = self._frontend.token_text
        best = {text_of(token_id): finite(logprob) for token_id, logprob in reversed(item.top[: self._wanted])}
        return dict(reversed(best.items())) | {text: finite(item.logprob)}
