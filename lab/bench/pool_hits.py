"""A prefix that comes back from the pool: its time with a latent, next to the same model with K and V per head.

  scripts/bench.py pool-hits
  scripts/bench.py pool-hits --prompt-tokens 2000 --transport tcp

Random models of about 300 million parameters, equal width, depth and heads (bench.py latent), one after the other. A
node with an arena for little more than one prompt computes a prompt, which a store node then pools, and another one,
which takes its place. The first prompt is asked for again. Its blocks arrive layer by layer, while the layers before
them compute the rest of the prompt, so the time of a hit is its TTFT.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.common.client import Client, greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, median_of, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.faults.tiny import tiny_model
from lab.flag_types import natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster

LAYERS, HEADS, HEAD_SIZE, BYTES, BLOCK = 16, 16, 64, 2, 16
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 16_384,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 256,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": HEAD_SIZE,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": LAYERS,
}
"""Every layer is dense."""

MODELS = {"latent": (LATENT, LAYERS * (256 + 32)), "K and V of 16 heads": ({}, LAYERS * 2 * HEADS * HEAD_SIZE)}
"""Name -> (changes to SIZES, elements of the KV of a token)."""

NODES = ("--dtype", "bfloat16", "--prefix-fetch", "always", "--block-size", str(BLOCK))
ROOM, OTHER = 1.2, 1.18
"""Arena and other prompt, relative to the prompt: the other one leaves nothing of it in the arena."""

PATIENCE_S, PUBLISHED_S = 600.0, 60.0
FIELDS = (
    ("loaded", "MB", "nbytes", 1e-6),
    ("TTFT of the hit", "ms", "ttft_s", 1e3),
    ("TTFT, computed", "ms", "computed_s", 1e3),
)
"""Metric, its unit, the field of Hit, and the unit's size."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One prompt that came back."""

    nbytes: int
    computed_s: float  # TTFT when nothing was known
    ttft_s: float  # of the hit


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--prompt-tokens", type=positive, default=4096, help="of each prompt (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="prompts that come back (default %(default)s)")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto", help="(default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), rounds=1, prompt_tokens=512)


async def hits(args: Namespace, name: str) -> list[Hit]:
    changed, elements = MODELS[name]
    each = args.prompt_tokens * elements * BYTES
    with tempfile.TemporaryDirectory(prefix="hits-") as folder:
        model = tiny_model(Path(folder), **SIZES, **changed)
        room = ("--kv-cache-bytes", str(int(ROOM * each)), "--transport", args.transport)
        shares = {"mixed-0": ("--dram-bytes", "0"), "store-0": ("--dram-bytes", str(4 * args.rounds * each))}
        with LocalCluster(
            "mixed=1,store=1", (*model, *NODES, *room), run_dir=Path(folder), role_flags=shares
        ) as cluster:
            url, store = cluster["mixed-0"].url, cluster["store-0"].url
            async with open_session() as session, asyncio.timeout(PATIENCE_S):
                client, source = await greedy_client(session, name, url), TokenSource(args.seed, 32000)
                lengths = (args.prompt_tokens, int(OTHER * args.prompt_tokens)) * args.rounds
                specs = [Spec(source.tokens(length, SUFFIX, i), 1) for i, length in enumerate(lengths)]
                found = []
                for first, second in zip(specs[::2], specs[1::2], strict=True):
                    pooled = await asyncio.to_thread(blocks_of, store)
                    computed = await client.ask(first)
                    await published(store, pooled + args.prompt_tokens // BLOCK)
                    await client.ask(second)
                    found.append(await hit(client, url, first, computed.ttft_s, elements))
                return found


def blocks_of(store: str) -> int:
    return int(rest.get(f"{store}/debug/state")["store"]["dram"]["blocks"])


async def published(store: str, blocks: int) -> None:
    """Wait until the store node has these blocks."""
    async with asyncio.timeout(PUBLISHED_S):
        while await asyncio.to_thread(blocks_of, store) < blocks:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)


async def hit(client: Client, url: str, spec: Spec, computed_s: float, elements: int) -> Hit:
    outcome = await client.ask(spec)
    events = (await asyncio.to_thread(rest.get, f"{url}/debug/requests/{outcome.request_id}"))["events"]
    waits = [event["detail"] for event in events if event["event"] == "waiting"]
    tokens = max(detail.get("cached_tokens", 0) for detail in waits)
    return Hit(tokens * elements * BYTES, computed_s, outcome.ttft_s)


async def measure(args: Namespace) -> list[Row]:
    ours, theirs = [await hits(args, name) for name in MODELS]
    case, other = f"{args.prompt_tokens} tokens", list(MODELS)[1]

    return [
        Row(case, metric, unit, median_of(name, scale, ours), {other: median_of(name, scale, theirs)})
        for metric, unit, name, scale in FIELDS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    try:
        rows = asyncio.run(measure(args))
    except KeyboardInterrupt:
        return 130
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report({"benchmark": "pool-hits", **used}, rows, args.json)
    return 0
