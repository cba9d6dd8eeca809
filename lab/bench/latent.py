"""A latent instead of K and V: steps of a random model, and the bytes of its KV, next to the same model with K and V.

  scripts/bench.py latent
  scripts/bench.py latent --quick --threads 2

Three models of about 300 million parameters and equal width, depth and heads: with a latent of 256 + 32 elements per
token and layer, with K and V of all 16 heads, and with K and V of 4 heads (grouped queries). Each decodes several
streams over several contexts, and computes a prompt. Weights are random, so tokens mean nothing. Bytes are those of
BlockGeometry, which arena, wire and pool follow.
"""

from __future__ import annotations

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
from lab.bench.ops.products import shortest
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
MODELS = {
    "latent": replace(HEADS, num_kv_heads=1, head_size=LATENT.row_size, latent=LATENT),
    "K and V of 16 heads": HEADS,
    "K and V of 4 heads": replace(HEADS, num_kv_heads=4),
}


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


def cases_of(batches: Sequence[int], contexts: Sequence[int], prompt: int) -> dict[str, list[StepRow]]:
    per_request = -(-max(*contexts, prompt) // BLOCK_SIZE)
    blocks = [list(range(i * per_request, (i + 1) * per_request)) for i in range(max(batches))]
    cases = {f"prefill {prompt}": [StepRow([5] * prompt, 0, blocks[0], SamplingRow(GREEDY, [1] * prompt, prompt))]}
    for context in contexts:
        for batch in batches:
            sampling = SamplingRow(GREEDY, [1] * context, context)
            cases[f"decode {batch} x {context}"] = [
                StepRow([5 + i], context - 1, own, sampling) for i, own in enumerate(blocks[:batch])
            ]
    return cases


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add_result_flags(parser)
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    batches, contexts, prompt = ([1, 4], [512], 128) if args.quick else ([1, 8], [1024, 4096], 512)
    num_blocks = max(batches) * -(-max(*contexts, prompt) // BLOCK_SIZE)
    cases, times = cases_of(batches, contexts, prompt), dict[str, dict[str, float]]()
    for name, config in MODELS.items():
        runner = runner_of(config, num_blocks)
        for case, rows in cases.items():
            times.setdefault(case, {})[name] = 1e3 * shortest(partial(runner.step, rows))
    found = [Row(case, "step", "ms", by.pop("latent"), {**by}) for case, by in times.items()]
    tokens = {name: geometry_of(config).block_bytes / BLOCK_SIZE for name, config in MODELS.items()}
    found.append(Row("KV of a token", "arena, wire and pool", "B", tokens.pop("latent"), {**tokens}))
    report({"benchmark": "latent", "threads": args.threads}, found, args.json)
    return 0
