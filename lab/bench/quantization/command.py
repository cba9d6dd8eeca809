"""The quality loss and the saved bytes of quantized KV and weights, on the real model.

  scripts/bench.py quantization --json quantization.json        # about three minutes on two cores
  scripts/bench.py quantization --model DIRECTORY --windows 32

A window of text is cut into two halves, and the first half, the prefix, is computed.

  pool TYPE    its KV is converted to a type of --pool-dtype and back, block by block, like a prefix found in the
               pool; the last block is computed again, as in the engine
  wire TYPE    all of its KV is converted to a type of --wire-dtype, as from a prefill node to a decode node; the first
               token is that of 16 bit, because the prefill node computes it
  arena TYPE   all tokens are computed over an arena of that --kv-cache-dtype
  weights TYPE all tokens are computed with that --weight-dtype; `stored` only with a GGUF file. Its weights are
               those of 16 bit, so only rounded activations change the result. int8 is Q8_0, int4 is Q4_1. Nothing here
               rounds to Q4_K, Q5_K or Q6_K; their blocks of 256 inputs do not fit the embedded model's rows of 576

Then

  perplexity       of the second half after that prefix, compared with 16 bit
  top-1            share of its tokens for which the most likely next token stays the same
  greedy           tokens generated before the first difference from 16 bit, and answers without a difference
  decode step      of some requests after that prefix, each in its own blocks (arena)

The text is the language reference inside Python (pydoc_data.topics): English, always available, and the same for one
version of Python.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cache.block import BlockGeometry
from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.model.decoder import Model
from engine.text.tokenizer import Tokenizer
from lab.bench.common.results import Row, add_result_flags, report
from lab.bench.quantization.decodes import Decodes
from lab.bench.quantization.prefixes import BLOCK, ENCODINGS, POOL_ENCODINGS, Prefixes, load_model
from lab.bench.quantization.quality import Answer, judged
from lab.flag_types import positive

AS_IS = "bfloat16"
ROUNDS = 9
"""Rounds of decode steps: the median counts, and all kinds of arena take turns."""


def text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of the text. Raises ValueError when it has fewer."""
    from pydoc_data.topics import topics  # 700 KB: only for this

    tokens: list[int] = []
    for name in sorted(topics):
        tokens += tokenizer.encode(topics[name])
        if len(tokens) >= count:
            return tokens[:count]
    raise ValueError(f"the text has {len(tokens)} tokens: use fewer --windows or a smaller --window-tokens")


def measure(args: Namespace) -> tuple[dict[str, object], list[Row]]:
    """Returns the configuration and the rows."""
    source = describe(args.model)
    tokens = text_tokens(Tokenizer.load(source, "auto"), args.windows * args.window_tokens)
    windows = [tokens[i * args.window_tokens :][: args.window_tokens] for i in range(args.windows)]
    model = load_model(source)
    most = args.window_tokens + args.new_tokens
    arenas = {name: Prefixes(model, most, name) for name in (AS_IS, *ENCODINGS)}
    forms = (*(["stored"] if source.format == "gguf" else []), "int8", "int4", "fp8", "mxfp4")
    quantized = {f"weights {form}": Prefixes(load_model(source, form), most) for form in forms}
    exact: list[Answer] = []
    others: dict[str, list[Answer]] = {f"pool {name}": [] for name in POOL_ENCODINGS}
    others |= {f"{what} {name}": [] for what in ("wire", "arena") for name in ENCODINGS}
    others |= {case: [] for case in quantized}
    for number, window in enumerate(windows, 1):
        for arena in (*arenas.values(), *quantized.values()):
            arena.compute(window[: args.window_tokens // 2])
        exact.append(arenas[AS_IS].answer(window, args.new_tokens))
        for name in POOL_ENCODINGS:
            others[f"pool {name}"].append(arenas[AS_IS].answer(window, args.new_tokens, name))
        for name in ENCODINGS:
            others[f"wire {name}"].append(arenas[AS_IS].answer_elsewhere(window, args.new_tokens, name, exact[-1]))
            others[f"arena {name}"].append(arenas[name].answer(window, args.new_tokens))
        for case, prefixes in quantized.items():
            others[case].append(prefixes.answer(window, args.new_tokens))
        print(f"window {number} of {len(windows)}", file=sys.stderr)
    rows = [row for name, answers in others.items() for row in quality_rows(name, answers, exact)]
    for name in POOL_ENCODINGS:
        rows += pool_rows(arenas[AS_IS], name)
    rows += size_rows({name: arena.geometry() for name, arena in arenas.items()})
    rows += step_rows(model, windows[0][: args.window_tokens // 2], args.requests)
    config = {
        "model": args.model,
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "windows": args.windows,
        "window_tokens": args.window_tokens,
        "predicted_tokens": sum(len(answer.losses) for answer in exact),
        "new_tokens": args.new_tokens,
        "requests": args.requests,
        "threads": torch.get_num_threads(),
    }
    return config, rows


def quality_rows(name: str, answers: Sequence[Answer], exact: Sequence[Answer]) -> list[Row]:
    verdict = judged(answers, exact)
    return [
        Row(name, "perplexity", "", verdict.perplexity, {AS_IS: verdict.exact_perplexity}),
        Row(name, "perplexity change", "%", 100 * (verdict.perplexity / verdict.exact_perplexity - 1)),
        Row(name, "top-1 agreement", "%", 100 * verdict.top1),
        Row(name, "greedy tokens until they differ, mean", "tokens", verdict.agreed, {}, {"generated": verdict.length}),
        Row(name, "greedy answers that never differ", "%", 100 * verdict.identical),
    ]


def pool_rows(prefixes: Prefixes, name: str) -> list[Row]:
    """Bytes that move per block, and the rate at which one thread converts (16-bit bytes per second)."""
    geometry = prefixes.geometry(name)
    encode_s, decode_s = prefixes.conversion_seconds(name)
    rate = geometry.block_bytes / 1e9
    return [
        Row(f"pool {name}", "bytes per block", "B", geometry.pool_bytes, {AS_IS: geometry.block_bytes}),
        Row(f"pool {name}", "encode, one thread", "GB/s", rate / encode_s),
        Row(f"pool {name}", "decode, one thread", "GB/s", rate / decode_s),
    ]


def size_rows(shapes: Mapping[str, BlockGeometry]) -> list[Row]:
    """Bytes of a block on its way to a decode node, and in an arena of each type."""
    wide = shapes[AS_IS]
    sizes = {f"wire {name}": replace(wide, wire_dtype=name).wire_bytes for name in ENCODINGS}
    sizes |= {f"arena {name}": shapes[name].block_bytes for name in ENCODINGS}
    return [Row(case, "bytes per block", "B", size, {AS_IS: wide.block_bytes}) for case, size in sizes.items()]


def step_rows(model: Model, prefix: Sequence[int], requests: int) -> list[Row]:
    """Times of a decode step of `requests` requests."""
    each = {name: Decodes(model, name, prefix, requests) for name in (AS_IS, *ENCODINGS)}
    times = [{name: decodes.step_seconds() for name, decodes in each.items()} for _ in range(ROUNDS)]
    median = {name: 1000 * statistics.median(time[name] for time in times) for name in each}
    what = f"decode step, {requests} requests of {len(prefix)} tokens"
    return [Row(f"arena {name}", what, "ms", median[name], {AS_IS: median[AS_IS]}) for name in ENCODINGS]


def parser() -> ArgumentParser:
    out = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    out.add_argument("--model", default=EMBEDDED_MODEL, help="the same values as for a node (default %(default)s)")
    out.add_argument("--windows", type=positive, default=12, help="pieces of text (default %(default)s)")
    out.add_argument("--window-tokens", type=positive, default=1024, help="a multiple of 32 (default %(default)s)")
    out.add_argument(
        "--new-tokens", type=positive, default=48, help="generated after each prefix (default %(default)s)"
    )
    out.add_argument("--requests", type=positive, default=16, help="requests of a decode step (default %(default)s)")
    add_result_flags(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.window_tokens % (2 * BLOCK) or min(args.windows, args.window_tokens, args.new_tokens, args.requests) < 1:
        print(
            f"scripts/bench.py quantization: --window-tokens must be a multiple of {2 * BLOCK}, all at least 1",
            file=sys.stderr,
        )
        return 2
    if args.quick:
        args.windows, args.window_tokens, args.new_tokens = min(2, args.windows), min(256, args.window_tokens), 16
    torch.set_grad_enabled(False)
    try:
        config, rows = measure(args)
    except ValueError as error:
        print(f"scripts/bench.py quantization: {error}", file=sys.stderr)
        return 2
    report(config, rows, args.json)
    sound = all(math.isfinite(row.ours) for row in rows if row.ours is not None)
    return 0 if sound else 1
