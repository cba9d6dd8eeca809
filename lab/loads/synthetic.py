"""A seeded substitute for the synthetic trace of FAST'25, for machines without its file. That trace mixes ShareGPT,
L-Eval and LooGLE 1:1:1.

Slightly less than half of the prompts are single, short and long chats; the others are questions about documents,
several about each, one or two minutes apart. Arrivals are Poisson. Fitted to the released trace: lengths, questions per
document, the time between them; hit rates by capacity follow (tests/lab/loads/test_generators.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from lab.loads.draws import Quantiles
from lab.loads.trace import BLOCK_TOKENS, TraceRow

RATE_S = 3_993 / 1_022
ALONE = 0.4515  # share of the prompts that share no block
PROMPT = Quantiles(
    (0, 19),
    (0.1, 22),
    (0.25, 34),
    (0.5, 169),
    (0.6, 2000),
    (0.75, 14_214),
    (0.9, 19_624),
    (0.99, 41_155),
    (0.998, 60_000),
    (1, 191_378),
)  # tokens of these prompts
DOCUMENT = Quantiles(
    (0, 600), (0.05, 826), (0.1, 2961), (0.25, 9322), (0.5, 19_494), (0.75, 35_357), (0.9, 43_741), (1, 70_000)
)
ASKED = (
    75,
    66,
    60,
    45,
    55,
    32,
    25,
    15,
    7,
    3,
    5,
    4,
    6,
    0,
    5,
    0,
    0,
    0,
    2,
    1,
    0,
    0,
    2,
)  # weights of documents with 2, 3, 4, ... questions
QUESTION = (5.8, 0.6)  # logarithm of its tokens: mean, deviation
GAP_S = 116.0  # mean time between two questions about a document
CHAT_ANSWER = Quantiles(
    (0, 1), (0.05, 17), (0.1, 43), (0.25, 140), (0.5, 251), (0.75, 354), (0.9, 513), (0.99, 782), (1, 893)
)
ANSWER = Quantiles((0, 1), (0.1, 2), (0.25, 6), (0.5, 15), (0.75, 54), (0.9, 117), (0.99, 532), (1, 893))


def synthetic(seed: int, requests: int, rate_s: float = RATE_S) -> list[TraceRow]:
    """`requests` rows, sorted by time."""
    rng, ids, span = Random(seed), count(), requests / rate_s
    prompts: list[tuple[float, int, int, list[int]]] = []  # approximate time, tokens, answer, blocks
    for _ in range(round(ALONE * requests)):
        tokens = PROMPT.draw(rng)
        prompts.append((span * rng.random(), tokens, CHAT_ANSWER.draw(rng), _blocks(ids, tokens)))
    while len(prompts) < requests:
        document = _blocks(ids, DOCUMENT.draw(rng) // BLOCK_TOKENS * BLOCK_TOKENS)
        at = span * rng.random()
        for _ in range(2 + rng.choices(range(len(ASKED)), ASKED)[0]):
            tokens = len(document) * BLOCK_TOKENS + 1 + round(rng.lognormvariate(*QUESTION))
            blocks = document + _blocks(ids, tokens - len(document) * BLOCK_TOKENS)
            prompts.append((at % span, tokens, ANSWER.draw(rng), blocks))
            at += rng.expovariate(1 / GAP_S)
    prompts.sort(key=lambda prompt: prompt[0])
    at, rows = 0.0, []
    for _, tokens, answer, blocks in prompts[:requests]:
        at += rng.expovariate(rate_s)
        rows.append(TraceRow(1000 * at, tokens, max(1, answer), blocks))
    return rows


def _blocks(ids: Iterator[int], tokens: int) -> list[int]:
    return [next(ids) for _ in range(-(-tokens // BLOCK_TOKENS))]
