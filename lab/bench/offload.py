"""A model of which most layers are read from disk in every pass: decode tokens/s, next to all layers in memory.

  scripts/bench.py offload
  scripts/bench.py offload --resident-layers 3 --batches 1,8,32,64 --offload-path /data --json out.json

Two real nodes, one after the other, with the same prompts over HTTP: one keeps all weights, one has memory for some of
the layers (--offload auto). Each answers 1, 8 and 32 prompts at once. The limit is the longer of what a pass reads, at
the rate that the node has measured without computation, and what the other node takes for a step of this batch: FlexGen
(arXiv 2303.06865, section 4) hides the shorter one as well. The reads pass by the page cache, so the disk is what is
measured; a disk that answers from its own cache, or from its host's memory, is faster than its medium.

In float32 the answers have equal tokens if our kernels multiply the weights of both nodes, as they do with
--weight-dtype stored, int8 or int4; with wide, the resident node takes torch's where these are faster.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import reading_of
from engine.config.config import EMBEDDED_MODEL
from engine.loading.offload_model import sizes_of
from lab.bench.common.client import greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.flag_types import natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster

VOCABULARY = 32_000
PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class Answered:
    """Some prompts at once on one node."""

    batch: int
    token_s: float  # median seconds between the tokens of a stream
    ttft_s: float  # median

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.token_s


def batches(text: str) -> tuple[int, ...]:
    """'1,8,32' -> (1, 8, 32). Raises ArgumentTypeError."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ArgumentTypeError(f"must be numbers of prompts joined by commas, not {text!r}")
    return found


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="as a node's (default %(default)s)")
    parser.add_argument("--resident-layers", type=positive, default=6, help="memory in layers (default %(default)s)")
    parser.add_argument("--batches", type=batches, default=(1, 8, 32), help="prompts at once (default 1,8,32)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="of each prompt (default %(default)s)")
    parser.add_argument("--output-tokens", type=positive, default=48, help="of each answer (default %(default)s)")
    parser.add_argument(
        "--weight-dtype",
        choices=("wide", "stored", "int8", "int4"),
        default="wide",
        help="as a node's, with --dtype float32 (default %(default)s)",
    )
    parser.add_argument("--offload-path", type=Path, help="folder for the layers (default: a temporary one)")
    parser.add_argument("--num-threads", type=positive, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    args = parser.parse_args(argv)
    if args.offload_path is not None and not args.offload_path.is_dir():
        parser.error(f"--offload-path {args.offload_path}: there is no such folder")
    if args.quick:
        args.batches = args.batches[:2]
    return quicken(args, output_tokens=12)


def memory_of(args: Namespace) -> int:
    """--weight-memory-bytes for --resident-layers, buffers included."""
    source, dtype = describe(args.model), torch.float32
    reading = reading_of(source, args.weight_dtype, dtype)
    with reading.opened:
        sizes = sizes_of(source.config, reading.kinds, dtype.itemsize)
    return sizes.fixed + int(args.resident_layers) * max(sizes.layers)


async def ask(args: Namespace, url: str, batch: int) -> Answered:
    """`batch` prompts at once. While some still compute their prompts, tokens come later, so the first half of the gaps
    does not count."""
    source = TokenSource(args.seed, VOCABULARY)
    specs = [Spec(source.tokens(args.prompt_tokens, SUFFIX, batch, i), args.output_tokens) for i in range(batch)]
    async with open_session() as session, asyncio.timeout(PATIENCE_S):
        client = await greedy_client(session, "ours", url)
        outcomes = await asyncio.gather(*(client.ask(spec) for spec in specs))
    gaps = [gap for one in outcomes for gap in one.itl_s[len(one.itl_s) // 2 :]]
    return Answered(batch, median(gaps), median(one.ttft_s for one in outcomes))


def text_of(args: Namespace, url: str, model: str, number: int) -> str:
    ids = TokenSource(args.seed, VOCABULARY).tokens(args.prompt_tokens, SUFFIX, 0, number)
    body = {"model": model, "prompt": ids, "max_tokens": args.output_tokens, "temperature": 0, "ignore_eos": True}
    return str(rest.post(f"{url}/v1/completions", body)["choices"][0]["text"])


async def measure_node(args: Namespace, more: Sequence[str]) -> tuple[list[Answered], list[str], dict[str, Any]]:
    """(for each batch, texts of a few answers, state of the node)."""
    given = (
        *("--model", args.model, "--dtype", "float32", "--weight-dtype", args.weight_dtype),
        *("--num-threads", str(args.num_threads), "--kv-cache-bytes", "400M", "--max-model-len", "1024"),
        *("--attention-backend", "cpu"),  # auto measures at each start which one is faster
    )
    with (
        tempfile.TemporaryDirectory(prefix="offload-") as folder,
        LocalCluster("mixed=1", (*given, *more), run_dir=Path(folder)) as cluster,
    ):
        url = cluster.nodes[0].url
        model = rest.get(f"{url}/v1/models")["data"][0]["id"]
        texts = [await asyncio.to_thread(text_of, args, url, model, number) for number in range(3)]
        found = [await ask(args, url, batch) for batch in args.batches]
        state = rest.get(f"{url}/debug/state")
    return found, texts, state


async def measure(args: Namespace) -> tuple[list[Row], dict[str, Any]]:
    resident, right, resident_state = await measure_node(args, ())
    with tempfile.TemporaryDirectory(prefix="offload-layers-", dir=args.offload_path) as folder:
        more = ("--offload", "auto", "--weight-memory-bytes", str(memory_of(args)), "--offload-path", folder)
        ours, texts, state = await measure_node(args, more)
    offload = state["engine"]["offload"]
    found = {
        "resident": [asdict(one) for one in resident],
        "streamed": [asdict(one) for one in ours],
        "offload": offload,
        "servers": {"streamed": state["config"], "resident": resident_state["config"]},
    }
    same = sum(a == b for a, b in zip(texts, right, strict=True)) / len(right)
    return rows_of(ours, resident, offload, same), found


def rows_of(ours: Sequence[Answered], resident: Sequence[Answered], offload: dict[str, Any], same: float) -> list[Row]:
    rate = offload["speed"]["read_bytes_s"]
    read_s = offload["pass_bytes"] / rate
    note = (
        f"{offload['streamed_layers']} of {offload['layers']} layers are read in each pass: "
        f"{offload['pass_bytes'] / 1e6:.0f} MB of {offload['weight_bytes'] / 1e6:.0f} MB at {rate / 1e9:.2f} GB/s "
        f"({'past the page cache' if offload['direct'] else 'through the page cache'}), {1e3 * read_s:.0f} ms, into "
        f"{offload['ring']} buffers; the limit is the longer of reading and a step of the resident node"
    )
    rows = []
    for mine, theirs in zip(ours, resident, strict=True):
        limit = mine.batch / max(read_s, theirs.token_s)
        rows.append(
            Row(
                "offload",
                f"decode, {mine.batch} at once",
                "1/s",
                mine.tokens_per_s,
                {"resident": theirs.tokens_per_s},
                {"limit": limit},
                note,
            )
        )
        rows.append(
            Row("offload", f"TTFT, {mine.batch} at once", "s", mine.ttft_s, {"resident": theirs.ttft_s}, note=note)
        )
    return [*rows, Row("offload", "answers with equal tokens", "share", same, note=note)]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    try:
        rows, found = asyncio.run(measure(args))
    except KeyboardInterrupt:
        return 130
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report({"benchmark": "offload", **used, **found}, rows, args.json)
    return 0
