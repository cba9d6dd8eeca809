"""The answer of a worker: the chunks of a streamed completion, as tokens. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from engine.handoff.updates import Ended, Token
from engine.sampling.params import TokenLogprobs

FINISHES = ("stop", "length")


class AnswerError(Exception):
    """The worker failed, or its answer is not in the form of a completion."""


@dataclass(slots=True)
class Answer:
    """The stream of one completion. `index`: of its first token among the request's output tokens."""

    index: int
    cached_tokens: int | None = None  # of the prompt, if the worker tells
    finished: bool = False
    done: bool = False  # the stream has ended as it should

    def line(self, line: bytes) -> Iterator[Token | Ended]:
        """The tokens in one line of the stream. Raises AnswerError."""
        if not line.startswith(b"data:"):
            return
        text = line[5:].strip()
        if text == b"[DONE]":
            self.done = True
            return
        try:
            yield from self._chunk(orjson.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise AnswerError(f"{type(error).__name__} in {text[:200]!r}") from None

    def _chunk(self, chunk: dict[str, Any]) -> Iterator[Token | Ended]:
        if "error" in chunk:
            raise AnswerError(f"it failed: {chunk['error']}")
        if (details := (chunk.get("usage") or {}).get("prompt_tokens_details")) is not None:
            self.cached_tokens = details.get("cached_tokens")
        for choice in chunk["choices"]:
            finish, ids = choice.get("finish_reason"), choice.get("token_ids")
            if finish is not None and finish not in FINISHES:
                raise AnswerError(f"it ended with finish_reason {finish!r}")
            if ids is None:
                if choice.get("text"):
                    raise AnswerError("it sends no token_ids: it needs return_token_ids, which vLLM has since 0.10.2")
                ids = []
            logprobs = _logprobs(choice.get("logprobs"), len(ids))
            self.finished = self.finished or finish is not None
            for at, token_id in enumerate(ids):
                last = finish if at == len(ids) - 1 else None
                yield Token(self.index, token_id, None if logprobs is None else logprobs[at], last)
                self.index += 1
            if finish is not None and not ids:
                yield Ended(finish)


def _logprobs(found: dict[str, Any] | None, count: int) -> list[TokenLogprobs] | None:
    if found is None:
        return None
    values, tops = found["token_logprobs"], found["top_logprobs"] or [None] * count
    if len(values) != count:
        raise AnswerError(f"it sends {len(values)} log probabilities for {count} tokens")
    return [TokenLogprobs(_finite(value), _best(top or {})) for value, top in zip(values, tops, strict=True)]


def _best(top: dict[str, float]) -> list[tuple[int, float]]:
    pairs = [(_id(name), _finite(value)) for name, value in top.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


def _id(name: str) -> int:
    """From vLLM's "token_id:123"."""
    if not name.startswith("token_id:"):
        raise AnswerError("it names tokens by text: log probabilities need return_tokens_as_token_ids, as vLLM has it")
    return int(name[9:])


def _finite(value: float | None) -> float:
    return -math.inf if value is None else value
