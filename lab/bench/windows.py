"""Layers that see a window: the KV of a prompt that moves to the decode node, next to the same model in uniform blocks.

  scripts/bench.py windows
  scripts/bench.py windows --prompt-tokens 2000 --window 1024 --transport tcp

A prefill and a decode node serve a random model in the manner of Gemma 3: five of six layers see a window. It is served
twice, with --kv-groups windows and with uniform. All KV moves after the prompt (--kv-overlap none), so `transfer` is
the time of the move alone. Weights are random, so tokens mean nothing; every round has a prompt of its own. The limit
of the bytes is what later tokens need: all tokens of the full layers, and a window of the others.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.common.client import greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, median_of, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.faults.tiny import tiny_model
from lab.flag_types import natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster

LAYERS, PERIOD, KV_HEADS, HEAD_SIZE, BYTES = 12, 6, 4, 64, 2
MODEL: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "query_pre_attn_scalar": HEAD_SIZE,
    "sliding_window_pattern": PERIOD,
    "max_position_embeddings": 32768,
}
NODES = ("--dtype", "bfloat16", "--kv-overlap", "none", "--kv-cache-bytes", "1G", "--num-threads", "1")
PATIENCE_S = 300.0
FIELDS = (("moved", "MB", "nbytes", 1e-6), ("transfer", "ms", "seconds", 1e3), ("TTFT", "ms", "ttft_s", 1e3))
"""Metric, its unit, the field of Moved, and the unit's size."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The KV of one prompt."""

    nbytes: int
    seconds: float
    ttft_s: float


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--prompt-tokens", type=positive, default=8000, help="of each prompt (default %(default)s)")
    parser.add_argument("--window", type=positive, default=512, help="tokens (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="prompts (default %(default)s)")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto", help="(default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), rounds=1, prompt_tokens=1500)


async def moved_with(args: Namespace, groups: str) -> tuple[list[Moved], str]:
    """(one for each prompt, the transport)"""
    found, transport = list[Moved](), ""
    with tempfile.TemporaryDirectory(prefix="windows-") as folder:
        model = tiny_model(Path(folder), **MODEL, sliding_window=args.window)
        given = (*model, *NODES, "--kv-groups", groups, "--transport", args.transport)
        with LocalCluster("prefill=1,decode=1", given, run_dir=Path(folder)) as cluster:
            url = cluster["decode-0"].url
            async with open_session() as session, asyncio.timeout(PATIENCE_S):
                client = await greedy_client(session, groups, url)
                source = TokenSource(args.seed, 32000)
                for number in range(args.rounds + 1):
                    outcome = await client.ask(Spec(source.tokens(args.prompt_tokens, SUFFIX, number), 2))
                    told = await asyncio.to_thread(rest.get, f"{url}/debug/requests/{outcome.request_id}")
                    (move,) = [event["detail"] for event in told["events"] if event["event"] == "kv_moved"]
                    if number:  # the first one also opens the path
                        found.append(Moved(move["bytes"], move["seconds"], outcome.ttft_s))
                        transport = move["transport"]
    return found, transport


async def measure(args: Namespace) -> list[Row]:
    windows, transport = await moved_with(args, "windows")
    uniform, _ = await moved_with(args, "uniform")
    case, full = f"{args.prompt_tokens} tokens, {transport}", LAYERS // PERIOD
    needed = full * args.prompt_tokens + (LAYERS - full) * min(args.window, args.prompt_tokens)
    row_bytes = 2 * KV_HEADS * HEAD_SIZE * BYTES

    limits = {"moved": {"needed": needed * row_bytes / 1e6}}
    return [
        Row(
            case,
            metric,
            unit,
            median_of(name, scale, windows),
            {"uniform": median_of(name, scale, uniform)},
            limits.get(metric, {}),
        )
        for metric, unit, name, scale in FIELDS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    try:
        rows = asyncio.run(measure(args))
    except KeyboardInterrupt:
        return 130
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report({"benchmark": "windows", **used, "model": MODEL}, rows, args.json)
    return 0
