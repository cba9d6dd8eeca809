"""Answers after a quantized prefix, compared with those after the exact one. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer for one window."""

    losses: list[float]  # negative log likelihood of each token of its second half
    best: list[int]  # most likely token at each of those places
    generated: list[int]  # greedily, after the first half


@dataclass(frozen=True, slots=True)
class Verdict:
    perplexity: float
    exact_perplexity: float
    top1: float  # share
    agreed: float  # mean number of generated tokens before the first that differs
    length: float  # mean number of generated tokens
    identical: float  # share


def judged(answers: Sequence[Answer], exact: Sequence[Answer]) -> Verdict:
    """Compares window by window. Raises ValueError unless both have the same windows."""
    pairs = list(zip(answers, exact, strict=True))
    agreed = [leading(one.generated, other.generated) for one, other in pairs]
    places = [a == b for one, other in pairs for a, b in zip(one.best, other.best, strict=True)]
    return Verdict(
        perplexity(answers),
        perplexity(exact),
        sum(places) / len(places),
        sum(agreed) / len(pairs),
        sum(len(other.generated) for other in exact) / len(pairs),
        sum(one.generated == other.generated for one, other in pairs) / len(pairs),
    )


def perplexity(answers: Sequence[Answer]) -> float:
    losses = [loss for answer in answers for loss in answer.losses]
    return math.exp(sum(losses) / len(losses))


def leading(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal leading tokens."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
