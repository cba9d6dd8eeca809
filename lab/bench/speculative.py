"""Decoding with and without speculation, in one run: tokens per step, acceptance, time per output token.

  scripts/bench.py speculative                       # n-grams, the embedded model, batches of 1 and 8 requests
  scripts/bench.py speculative --draft PATH          # and a draft model
  scripts/bench.py speculative --quick --json s.json

Prompts: `copy` asks for answers that repeat large parts of the prompt (copying, editing code, quoting); `chat` asks
ordinary questions. Greedy answers through batcher, runner and speculator without a network. Variants take turns, prompt
by prompt, so that a slow moment of the machine affects all of them; the fastest round of each prompt and variant
counts. Time per output token covers the steps that compute no prompt. Greedy tokens are the same with and without
speculation, except in bfloat16, which rounds differently for another batch shape: the table shows the share before the
first difference.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch

from cache.block import BlockGeometry
from cache.keys import root_key
from cache.pool.block_pool import BlockPool
from engine.checkpoint.model_source import describe
from engine.core.batcher import Batcher, BatchRules
from engine.core.costs import StepCosts
from engine.sampling.params import SamplingParams
from engine.speculation.draft import DraftModel
from engine.speculation.ngram import NgramLookups
from engine.speculation.speculative import Lookups, Speculator, accepted
from engine.speculation.suffix import SuffixLookups, SuffixRules
from engine.step.request import Request
from engine.step.rows import row_of
from engine.step.runner import Runner
from engine.text.tokenizer import Tokenizer
from lab.bench.common.results import Row as Result
from lab.bench.common.results import add_result_flags, report
from lab.drafts.runner import BLOCK_SIZE, runner_of
from lab.flag_types import positive

CODE = """def total_price(items, tax):
    result = 0
    for item in items:
        price = item.price * item.count
        if item.discount:
            price = price - item.discount
        result = result + price
    return result * (1 + tax)
"""
STORY = (
    "In a small harbour town the tide comes in twice a day, and twice a day the old clock on the customs house is "
    "wound by whoever happens to pass. Nobody remembers who began this, but the clock has never stopped. "
)
PROMPTS = {
    "copy": [
        f"Repeat the following text exactly, word for word:\n\n{STORY}",
        f"Rename the variable result to total in this code and show the whole code:\n\n{CODE}",
        f"Correct the spelling of this text and write all of it again:\n\n{STORY}",
        f"Add a docstring to this Python function and print the complete function:\n\n{CODE}",
    ],
    "chat": [
        "What is the capital of France, and what is it known for?",
        "Explain in a few sentences why the sky is blue.",
        "Give me three tips for sleeping better.",
        "Write a short poem about the sea.",
    ],
}


LOOKUPS: dict[str, Callable[[], Lookups]] = {
    "ngram": lambda: NgramLookups(2, 4),
    "suffix": lambda: SuffixLookups(SuffixRules(kept_tokens=0)),
    "suffix again": lambda: SuffixLookups(SuffixRules()),
}
"""Methods with the defaults of a node. Rounds repeat the prompts, so only `again` may remember earlier answers: it has
seen each answer before, except in the first round."""


@dataclass(slots=True)
class Measured:
    """One variant over all prompts of a case."""

    seconds: float = 0.0
    tokens: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    def add(self, other: Measured) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class Variant:
    """A way to decode. It learns step costs over the whole run, like a node."""

    name: str
    method: str
    length: str = "fixed"
    draft: DraftModel | None = None
    num_tokens: int = 4
    costs: StepCosts = field(default_factory=StepCosts)
    speculator: Speculator | None = None

    def __post_init__(self) -> None:
        if self.method != "none":
            lookups = LOOKUPS[self.method]() if self.method in LOOKUPS else None
            self.speculator = Speculator(
                self.method, self.num_tokens, lookups, self.length, 8192, self.costs.verify_cost, self.draft,
            )  # fmt: skip


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the model served")
    parser.add_argument("--draft", help="a draft model of the same vocabulary")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--num-speculative-tokens", type=positive, default=4)
    parser.add_argument("--max-tokens", type=positive, default=96, help="output tokens per request")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.load(describe(args.model))
    target = runner_of(args.model, args.dtype)
    k = args.num_speculative_tokens
    variants = [Variant("none", "none")]
    for method in LOOKUPS:
        variants += [Variant(f"{method} {length}", method, length, None, k) for length in ("auto", "fixed")]
    if args.draft:
        draft = DraftModel(runner_of(args.draft, args.dtype), rejection=True)
        variants += [Variant(f"draft {length}", "draft", length, draft, k) for length in ("auto", "fixed")]
    results: list[Result] = []
    for case, questions in PROMPTS.items():
        prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in questions]
        if args.quick:
            prompts = prompts[:2]
        for batch in (1,) if args.quick else (1, 8):
            groups = [[prompt] for prompt in prompts] if batch == 1 else [(prompts * batch)[:batch]]
            results += measure(f"{case} x{batch}", groups, target, variants, args)
    report({name: value for name, value in vars(args).items() if name != "json"}, results, args.json)
    for row in results:
        if row.metric == "ms per token" and row.ours is not None and row.ours > (row.peers.get("none") or row.ours):
            print(f"loses: {row.case} takes {row.ours / (row.peers['none'] or 1):.2f}x the time of no speculation")
    return 0


def measure(
    case: str, groups: Sequence[Sequence[list[int]]], target: Runner, variants: Sequence[Variant], args: Namespace
) -> list[Result]:
    measured = {variant.name: Measured() for variant in variants}
    for group in groups:
        best: dict[str, Measured] = {}
        for variant in [*variants] * args.rounds:
            one = decode(group, target, variant, args)
            if variant.name not in best or one.seconds_per_token < best[variant.name].seconds_per_token:
                best[variant.name] = one
        for variant in variants:
            measured[variant.name].add(best[variant.name])
    plain = measured["none"]
    per_token = 1000 * plain.seconds_per_token
    rows = []
    for variant in variants[1:]:
        m, name = measured[variant.name], f"{case} {variant.name}"
        rows += [
            Result(name, "ms per token", "ms", 1000 * m.seconds_per_token, peers={"none": per_token}),
            Result(name, "tokens per row and step", "", m.tokens / m.rows),
            Result(name, "acceptance", "", m.accepted / m.drafted if m.drafted else None),
            Result(name, "drafts per row and step", "", m.drafted / m.rows),
            Result(name, "equal tokens", "", agreement(plain.texts, m.texts)),
        ]
    return rows


def agreement(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Share of tokens before the first difference."""
    same = [accepted(a[: len(b)], b) for a, b in zip(ours, theirs, strict=True)]
    return sum(same) / sum(len(text) for text in ours)


def decode(prompts: Sequence[list[int]], target: Runner, variant: Variant, args: Namespace) -> Measured:
    """Answer all prompts together."""
    into = Measured()
    config = target.model.config
    batcher = Batcher(
        *(BlockPool(len(target.kv_pool)), BLOCK_SIZE, 64, 1024, 8192, config.eos_token_ids),
        BatchRules(speculator=variant.speculator),
    )
    geometry = BlockGeometry(config.num_layers, config.num_kv_heads, config.head_size, BLOCK_SIZE, args.dtype)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    requests = [
        Request(f"r{i}", list(p), len(p), params, float(i), root_key("bench", geometry)) for i, p in enumerate(prompts)
    ]
    for request in requests:
        batcher.add(0.0, request)
    while one_step(batcher, target, variant, into):
        pass
    into.texts = [list(request.output_ids) for request in requests]
    batcher.check_integrity()
    return into


def one_step(batcher: Batcher, target: Runner, variant: Variant, into: Measured) -> bool:
    """Runs one step like the worker; False when no work is left."""
    begin = time.perf_counter()
    step = batcher.schedule(0.0)
    if step is None:
        return False
    eos = tuple(batcher.eos_token_ids)
    proposals = variant.draft.propose(step.rows, eos) if variant.draft else {}
    compute = time.perf_counter()
    sampled = target.step([row_of(row, eos, proposals.get(row.request.request_id, ())) for row in step.rows])
    variant.costs.observe(step, time.perf_counter() - compute)
    tokens: list[list[int] | None] = []
    for row, chosen in zip(step.rows, sampled, strict=True):
        ids = [token.token_id for token in chosen]
        if row.draft and variant.speculator is not None:
            right = accepted(row.draft, ids)
            variant.speculator.verified(row.request, len(row.draft), right)
            into.drafted, into.accepted, ids = into.drafted + len(row.draft), into.accepted + right, ids[: right + 1]
        tokens.append(ids or None)
    done = batcher.commit(0.0, step, tokens)
    if all(row.num_tokens - row.num_drafts == 1 for row in step.rows):
        into.seconds += time.perf_counter() - begin
        into.rows += len(step.rows)
        into.tokens += sum(kept for *_, kept in done.emitted)
    return True
