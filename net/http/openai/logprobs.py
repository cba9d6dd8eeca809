"""Log probabilities in the format of /v1/completions: four lists over the tokens of a choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from net.http.common.frontend import Frontend, LogprobItem

MIN_LOGPROB = -9999.0
"""JSON has no -inf; OpenAI's value for 'very unlikely'."""


LOST_BYTES = 8
"""So many bytes of a text may be missing between two tokens: vocabularies do not have all of them."""


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class TextOffsets:
    """Where the tokens of a choice begin in its text, in characters. A token that begins inside a character, as a part
    of its UTF-8 form, has that character's place."""

    def __init__(self, echo: str) -> None:
        """echo: the text of the prompt, where the choice's begins with it; else empty."""
        self._echo = echo.encode("utf-8", "surrogatepass")
        self._passed = 0  # bytes of the echo that belong to tokens seen
        self._prompt_at = 0
        self._output_at = len(echo)

    def of_prompt(self, raw: bytes) -> int:
        """Of the prompt's next token, given its bytes. One that is not in the text, like a BOS that the tokenizer has
        put before it, has no width."""
        if not self._passed and not self._echo.startswith(raw):
            raw = raw.removeprefix(b" ")  # SentencePiece writes one before the first word
        begin = self._echo.find(raw, self._passed, self._passed + LOST_BYTES + len(raw))
        if begin < 0:
            return self._prompt_at
        _, self._prompt_at = _step(self._prompt_at, self._echo[self._passed : begin])
        self._passed = begin + len(raw)
        at, self._prompt_at = _step(self._prompt_at, raw)
        return at

    def of_output(self, raw: bytes) -> int:
        """Of the next generated token."""
        at, self._output_at = _step(self._output_at, raw)
        return at


def _step(at: int, raw: bytes) -> tuple[int, int]:
    """(where the token begins, where the next one does) for `at` characters begun before it."""
    inside = bool(raw) and _continues(raw[0])
    return max(0, at - inside), at + sum(not _continues(byte) for byte in raw)


def _continues(byte: int) -> bool:
    """Is it a byte of a character that began before?"""
    return byte & 0xC0 == 0x80


def prompt_logprobs(
    frontend: Frontend, items: Sequence[LogprobItem], wanted: int
) -> Iterator[dict[str, dict[str, Any]] | None]:
    """As vLLM shows them: per token of the prompt {token id: {logprob, rank, decoded_token}} of the token itself and of
    the `wanted` best; None for the first token. `items`: of all but the first."""

    def told(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": frontend.token_text(token_id)}

    yield None
    for item in items:
        best = {str(one): told(one, logprob, at) for at, (one, logprob) in enumerate(item.top[:wanted], 1)}
        yield {str(item.token_id): told(item.token_id, item.logprob, item.rank)} | best


class CompletionLogprobs:
    """Those of one choice, as its outputs come."""

    def __init__(self, frontend: Frontend, wanted: int, prompt: list[int], echo: str) -> None:
        """wanted: number of best tokens shown per token; prompt: its token ids."""
        self._frontend = frontend
        self._wanted = wanted
        self._prompt = prompt
        self._offsets = TextOffsets(echo)

    def render(self, of_prompt: Sequence[LogprobItem] | None, of_output: list[LogprobItem]) -> dict[str, list[Any]]:
        """of_prompt: of the prompt's tokens but the first, which nothing comes before; None: not shown here."""
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
        """By text. Of two ids with one text the likelier stands; the token itself is always there."""
        text_of = self._frontend.token_text
        best = {text_of(token_id): finite(logprob) for token_id, logprob in reversed(item.top[: self._wanted])}
        return dict(reversed(best.items())) | {text: finite(item.logprob)}
