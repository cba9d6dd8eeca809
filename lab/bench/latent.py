"""A latent instead of K and V: steps of a random model, and the bytes of its KV, next to the same model with K and V.

  scripts/bench.py latent
  scripts/bench.py latent --quick --threads 2

Three models of about 300 million parameters and equal width, depth and heads: with a latent of 256 + 32 elements per
token and layer, with K and V of all 16 heads, and with K and V of 4 heads (grouped queries). Each decodes several
streams over several contexts, and computes prompts, one of them behind a past. The latent computes prompts as auto
chooses (engine/model/latent_prompts.py) and, as a fourth model, absorbed. Models take turns, a round at a time. Weights
are random, so tokens mean nothing. Bytes are those of BlockGeometry, which arena, wire and pool follow.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from attention.choice.choose import choose
from cache.block import BlockGeometry
from engine.checkpoint.weights import DummyWeights, shapes
from engine.model.decoder import Model
from engine.model.latent_config import Latent
from engine.model.model_config import ModelConfig
from engine.model.ops.choice import choose_ops
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.step.inputs import Row as StepRow
from engine.step.runner import Runner
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.common.timing import timed
from lab.flag_types import positive

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
HEADS = ModelConfig(
    num_layers=16,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=16,
    head_size=64,
    intermediate_size=4096,
    vocab_size=32_000,
    max_position_embeddings=16_384,
)
LATENT = Latent(rank=256, rope_size=32, nope_size=64, value_size=64)
OURS, ABSORBED = "latent", "latent, absorbed"
MODELS = {
    OURS: replace(HEADS, num_kv_heads=1, head_size=LATENT.row_size, latent=LATENT),
    ABSORBED: replace(HEADS, num_kv_heads=1, head_size=LATENT.row_size, latent=replace(LATENT, prompts="absorbed")),
    "K and V of 16 heads": HEADS,
    "K and V of 4 heads": replace(HEADS, num_kv_heads=4),
}
ROUNDS = 5
"""The models take turns; the best round of each counts."""


def geometry_of(config: ModelConfig) -> BlockGeometry:
    sizes = config.num_layers, config.num_kv_heads, config.head_size, BLOCK_SIZE
    return BlockGeometry(*sizes, "bfloat16", kind=config.kv_kind)


def runner_of(config: ModelConfig, num_blocks: int) -> Runner:
    rank = 0 if config.latent is None else config.latent.rank
    backend = choose(
        "auto", "cpu", config.head_size, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, rank=rank
    )
    random = DummyWeights(config, 0)
    weights = {name: random.read(name).bfloat16() for name in shapes(config)}
    model = Model(config, weights, backend, ops=choose_ops(backend.name, "cpu", torch.bfloat16))
    return Runner(model, torch.zeros(num_blocks, *geometry_of(config).shape, dtype=torch.bfloat16), BLOCK_SIZE)


def cases_of(
    batches: Sequence[int], contexts: Sequence[int], prompts: Sequence[tuple[int, int]]
) -> dict[str, list[StepRow]]:
    """prompts: pairs (new tokens, tokens of the past)."""
    per_request = blocks_of(contexts, prompts)
    blocks = [list(range(i * per_request, (i + 1) * per_request)) for i in range(max(batches))]
    cases = {}
    for new, past in prompts:
        sampling = SamplingRow(GREEDY, [1] * (past + new), past + new)
        name = f"prefill {new} after {past}" if past else f"prefill {new}"
        cases[name] = [StepRow([5] * new, past, blocks[0], sampling)]
    for context in contexts:
        for batch in batches:
            sampling = SamplingRow(GREEDY, [1] * context, context)
            cases[f"decode {batch} x {context}"] = [
                StepRow([5 + i], context - 1, own, sampling) for i, own in enumerate(blocks[:batch])
            ]
    return cases


def blocks_of(contexts: Sequence[int], prompts: Sequence[tuple[int, int]]) -> int:
    """Per request."""
    return -(-max(*contexts, *(sum(prompt) for prompt in prompts)) // BLOCK_SIZE)


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    batches, contexts, prompts = [1, 8], [1024, 4096], [(512, 0), (2048, 0), (512, 3584)]
    if args.quick:
        batches, contexts, prompts = [1, 4], [512], [(128, 0), (128, 128)]
    num_blocks = max(batches) * blocks_of(contexts, prompts)
    runners = {name: runner_of(config, num_blocks) for name, config in MODELS.items()}
    found = []
    for case, rows in cases_of(batches, contexts, prompts).items():
        times = dict.fromkeys(runners, math.inf)
        for _ in range(ROUNDS):
            for name, runner in runners.items():
                times[name] = min(times[name], 1e3 * min(timed(partial(runner.step, rows), 1)))
        if not case.startswith("prefill"):
            del times[ABSORBED]  # the same step
        found.append(Row(case, "step", "ms", times.pop(OURS), {**times}))
    tokens = {name: geometry_of(config).block_bytes / BLOCK_SIZE for name, config in MODELS.items()}
    del tokens[ABSORBED]
    found.append(Row("KV of a token", "arena, wire and pool", "B", tokens.pop(OURS), {**tokens}))
    report({"benchmark": "latent", "threads": args.threads}, found, args.json)
    return 0
