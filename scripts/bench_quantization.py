#!/usr/bin/env python3
"""What a quantized pool costs in quality and saves in bytes: the real model behind prefixes that came back from it.

  scripts/bench_quantization.py --json quantization.json        # about a minute on two cores
  scripts/bench_quantization.py --model DIRECTORY --windows 32

A window of text is cut in two. The KV of its first half is computed, sent through a type of --pool-dtype and back,
block by block, as a prefix that is found in the pool; the last block is computed anew, as the engine does. Then

  perplexity       of the second half behind that prefix, beside the same in 16 bit
  top-1            share of its tokens for which the most likely next token stays the same
  greedy           tokens generated until the first that differs from 16 bit, and answers that never differ

The text is the language reference inside Python (pydoc_data.topics): English, at hand everywhere, the same for one
version of Python.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from anywhere, without installing

import torch

from engine.checkpoint.model_source import describe
from engine.config import EMBEDDED_MODEL
from engine.text.tokenizer import Tokenizer
from scripts.benchlib.results import Row, add_result_flags, report
from scripts.quantbench.prefixes import BLOCK, POOL_DTYPES, Prefixes
from scripts.quantbench.quality import Answer, judged

AS_IS = "bfloat16"


def text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of the text. Raises ValueError when it has fewer."""
    from pydoc_data.topics import topics  # 700 KB: only for this

    tokens: list[int] = []
    for name in sorted(topics):
        tokens += tokenizer.encode(topics[name])
        if len(tokens) >= count:
            return tokens[:count]
    raise ValueError(f"the text has {len(tokens)} tokens: fewer --windows, or a smaller --window-tokens")


def measure(args: Namespace) -> tuple[dict[str, object], list[Row]]:
    """Configuration and rows."""
    source = describe(args.model)
    tokens = text_tokens(Tokenizer.load(source, "auto"), args.windows * args.window_tokens)
    windows = [tokens[i * args.window_tokens :][: args.window_tokens] for i in range(args.windows)]
    prefixes = Prefixes(source, args.window_tokens + args.new_tokens)
    answers: dict[str, list[Answer]] = {name: [] for name in (AS_IS, *POOL_DTYPES)}
    for number, window in enumerate(windows, 1):
        prefixes.compute(window[: args.window_tokens // 2])
        for name in answers:
            answers[name].append(prefixes.answer(window, name, args.new_tokens))
        print(f"window {number} of {len(windows)}", file=sys.stderr)
    rows = [row for name in POOL_DTYPES for row in quality_rows(name, answers[name], answers[AS_IS])]
    for name in POOL_DTYPES:
        rows += byte_rows(prefixes, name)
    config = {
        "model": args.model,
        "dtype": "bfloat16",
        "block_size": BLOCK,
        "windows": args.windows,
        "window_tokens": args.window_tokens,
        "predicted_tokens": sum(len(answer.losses) for answer in answers[AS_IS]),
        "new_tokens": args.new_tokens,
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


def byte_rows(prefixes: Prefixes, name: str) -> list[Row]:
    """Bytes that move per block, and how fast one thread converts (16-bit bytes per second)."""
    geometry = prefixes.geometry(name)
    encode_s, decode_s = prefixes.conversion_seconds(name)
    rate = geometry.block_bytes / 1e9
    return [
        Row(name, "bytes per block", "B", geometry.pool_bytes, {AS_IS: geometry.block_bytes}),
        Row(name, "encode, one thread", "GB/s", rate / encode_s),
        Row(name, "decode, one thread", "GB/s", rate / decode_s),
    ]


def parser() -> ArgumentParser:
    out = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    out.add_argument("--model", default=EMBEDDED_MODEL, help="as for a node (default %(default)s)")
    out.add_argument("--windows", type=int, default=12, help="pieces of text (default %(default)s)")
    out.add_argument("--window-tokens", type=int, default=1024, help="a multiple of 32 (default %(default)s)")
    out.add_argument("--new-tokens", type=int, default=48, help="generated behind each prefix (default %(default)s)")
    add_result_flags(out)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.window_tokens % (2 * BLOCK) or min(args.windows, args.window_tokens, args.new_tokens) < 1:
        print(f"bench_quantization: --window-tokens must be a multiple of {2 * BLOCK}", file=sys.stderr)
        return 2
    if args.quick:
        args.windows, args.window_tokens, args.new_tokens = min(2, args.windows), min(256, args.window_tokens), 16
    torch.set_grad_enabled(False)
    try:
        config, rows = measure(args)
    except ValueError as error:
        print(f"bench_quantization: {error}", file=sys.stderr)
        return 2
    report(config, rows, args.json)
    sound = all(math.isfinite(row.ours) for row in rows if row.ours is not None)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
