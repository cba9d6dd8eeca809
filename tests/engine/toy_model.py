"""A batcher and a toy model for it, whose tokens depend on the whole context and are never EOS."""

from __future__ import annotations

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.sampling.params import SamplingParams
from engine.step.request import Request
from engine.step.step import Step
from sched.batching import DecodeFirst
from sched.queueing import FCFS

ROOT = root_key("toy", BlockGeometry(1, 1, 2, 4, "float32"))
EOS = 0


def batcher(blocks=16, block_size=4, seqs=4, budget=16, max_len=1000, caching=True, order=None, policy=None) -> Batcher:
    rules = BatchRules(caching, policy or DecodeFirst(), order or FCFS())
    return Batcher(BlockPool(blocks), block_size, seqs, budget, max_len, {EOS}, rules)


def request(name: str, prompt: list[int], arrival=0.0, **sampling) -> Request:
    params = SamplingParams(**({"max_tokens": 4} | sampling))
    return Request(name, list(prompt), len(prompt), params, arrival, ROOT)


def next_token(tokens: list[int]) -> int:
    """The toy model: depends on the whole context, never EOS."""
    return 1 + (sum(tokens) * 31 + len(tokens)) % 50


def run_step(b: Batcher, now: float, step: Step):
    sampled = [(next_token(row.request.token_ids),) if row.samples else None for row in step.rows]
    return b.commit(now, step, sampled)


def run_dry(b: Batcher, limit=500, step_s=0.0) -> None:
    """Steps begin a second apart, and take `step_s`."""
    for now in range(limit):
        for r in b.loads(now, 4):
            b.loaded(now, r)
        step = b.schedule(now)
        if step is None:
            return
        run_step(b, now + step_s, step)
    raise AssertionError(f"not dry after {limit} steps: {b.requests}")


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
