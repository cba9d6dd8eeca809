"""Conversations that a chat model writes itself: it continues the head of a user's turn, then answers.

The model gets its template up to the first word of the user and samples a question (Magpie: Xu et al., arXiv
2406.08464), then the answer to it. No data set is needed, and the text is of the kind that the model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from engine.step.rows import row_of
from engine.step.runner import Runner
from engine.text.tokenizer import Tokenizer

SEATS = 24
"""Conversations that the model writes at the same time."""

QUESTION_TOKENS = 64
QUESTION_TEMPERATURE, ANSWER_TEMPERATURE = 1.0, 0.7
MARKS = "a", "b"
"""Two questions: their templates are equal up to the first word of the user."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids of a whole conversation; those before index `answer` are the template and the question."""

    tokens: list[int]
    answer: int


def conversations(
    runner: Runner, tokenizer: Tokenizer, count: int, answer_tokens: int, seed: int
) -> list[Conversation]:
    """Lets the model write `count` conversations, each with an answer of at most `answer_tokens` tokens."""
    asked = written(runner, [opening(tokenizer)] * count, QUESTION_TOKENS, QUESTION_TEMPERATURE, seed)
    ends = runner.model.config.eos_token_ids
    questions = [tokenizer.decode([token for token in one if token not in ends]) for one in asked]
    prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in questions]
    answers = written(runner, prompts, answer_tokens, ANSWER_TEMPERATURE, seed + count)
    return [Conversation(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


def opening(tokenizer: Tokenizer) -> list[int]:
    """The chat template up to the first word of the user."""
    one, other = (tokenizer.chat([{"role": "user", "content": mark}]) for mark in MARKS)
    return one[: next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]


def written(
    runner: Runner, prompts: Sequence[list[int]], max_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """The tokens that the model adds to each prompt, at most `max_tokens`; prompt i is sampled with seed + i."""
    config, blocks = runner.model.config, len(runner.kv_pool)
    eos = tuple(config.eos_token_ids)
    longest = max(map(len, prompts)) + max_tokens
    batcher = Batcher(BlockPool(blocks), runner.block_size, SEATS, 1024, longest, eos)
    dtype = str(runner.kv_pool.dtype).removeprefix("torch.")
    root = root_key(
        "text", BlockGeometry(config.num_layers, config.num_kv_heads, config.head_size, runner.block_size, dtype)
    )
    requests = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + index)
        requests.append(Request(f"text-{index}", list(prompt), len(prompt), params, float(index), root))
        batcher.add(0.0, requests[-1])
    while (step := batcher.schedule(0.0)) is not None:
        sampled = runner.step([row_of(row, eos, ()) for row in step.rows])
        batcher.commit(0.0, step, [[token.token_id for token in chosen] or None for chosen in sampled])
    return [list(request.output_ids) for request in requests]
