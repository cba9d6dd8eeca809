"""The requests of a benchmark: prompts as token ids, output lengths, arrival times. Seeded, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Spec:
    """One request to send."""

    token_ids: Tokens
    output_len: int  # tokens
    at_s: float = 0.0  # seconds after the run's start
    text: str = ""  # the same prompt as text, for servers that take no ids


class TokenSource:
    """Token ids by name: the same (seed, name, length) always gives the same ids."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        """vocab_size: ids are drawn below it, except the lowest eighth (at most 1,000), where special ids are."""
        if vocab_size < 8:
            raise ValueError(f"--vocab-size must be at least 8, got {vocab_size}")
        self._seed = seed
        self._low, self._high = min(1000, vocab_size // 8), vocab_size

    def tokens(self, length: int, *name: int) -> Tokens:
        rng = np.random.default_rng([self._seed, *name])
        ids: Tokens = rng.integers(self._low, self._high, length).tolist()
        return ids


# First part of a token name: the purpose of the tokens.
PREFIX, SUFFIX, BLOCK, WARMUP = range(4)


def random_specs(
    source: TokenSource, seed: int, count: int, input_len: int, output_len: int, prefix_len: int, range_ratio: float
) -> list[Spec]:
    """vLLM's `random`: one prefix shared by all, then input_len random tokens; lengths uniform in
    [len * (1 - range_ratio), len * (1 + range_ratio)]."""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio must be in [0, 1), got {range_ratio}")
    rng = np.random.default_rng([seed, 1])

    def lengths(mean: int) -> list[int]:
        low, high = int(mean * (1 - range_ratio)), int(np.ceil(mean * (1 + range_ratio)))
        drawn: list[int] = rng.integers(max(1, low), max(1, high) + 1, count).tolist()
        return drawn

    prefix = source.tokens(prefix_len, PREFIX, 0)
    inputs, outputs = lengths(input_len), lengths(output_len)
    return [
        Spec(prefix + source.tokens(size, SUFFIX, index), output)
        for index, (size, output) in enumerate(zip(inputs, outputs, strict=True))
    ]


def prefix_repetition_specs(
    source: TokenSource, seed: int, count: int, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int
) -> list[Spec]:
    """vLLM's `prefix_repetition`: num_prefixes prefixes in equal shares and random order, each followed by a different
    suffix."""
    if not 1 <= num_prefixes <= count:
        raise ValueError(f"--prefix-repetition-num-prefixes must be in 1..{count} (--num-prompts), got {num_prefixes}")
    prefixes = [source.tokens(prefix_len, PREFIX, index) for index in range(num_prefixes)]
    order = np.random.default_rng([seed, 2]).permutation(count) % num_prefixes
    return [
        Spec(prefixes[which] + source.tokens(suffix_len, SUFFIX, index), output_len)
        for index, which in enumerate(order)
    ]


def with_arrivals(specs: Sequence[Spec], seed: int, request_rate: float, burstiness: float) -> list[Spec]:
    """Open-loop arrival times with gamma-distributed gaps: burstiness 1 = Poisson, smaller = burstier, larger =
    steadier.

    As in vLLM the gaps are scaled so that all of them take exactly count / request_rate seconds. An infinite rate sends
    all requests together.
    """
    if not request_rate > 0 or not burstiness > 0:
        raise ValueError(f"--request-rate and --burstiness must be positive, got {request_rate} and {burstiness}")
    if np.isinf(request_rate):
        return [replace(spec, at_s=0.0) for spec in specs]
    gaps = np.random.default_rng([seed, 3]).gamma(burstiness, 1 / (request_rate * burstiness), len(specs))
    times = np.cumsum(gaps)
    times *= len(specs) / request_rate / times[-1]
    return [replace(spec, at_s=float(at)) for spec, at in zip(specs, times, strict=True)]


def in_rounds(specs: Sequence[Spec], rounds: int) -> list[list[Spec]]:
    """Consecutive parts of about equal size, each with times from its own start."""
    bounds = [len(specs) * i // rounds for i in range(rounds + 1)]
    parts = []
    for start, stop in pairwise(bounds):
        origin = specs[start - 1].at_s if start else 0.0
        parts.append([replace(spec, at_s=spec.at_s - origin) for spec in specs[start:stop]])
    return [part for part in parts if part]


def as_text(token_ids: Sequence[int]) -> str:
    """A prompt of made-up words, one per id, for APIs that take no token ids. Equal ids give equal words, so shared
    prefixes stay shared; the server's token count differs from len(token_ids)."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [c + v for c in consonants for v in vowels]
    words = []
    for token_id in token_ids:
        word, rest = syllables[token_id % len(syllables)], token_id // len(syllables)
        while rest:
            word, rest = word + syllables[rest % len(syllables)], rest // len(syllables)
        words.append(word)
    return " ".join(words)
