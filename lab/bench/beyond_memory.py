"""A context several times the arena of its node: decode tokens/s, next to the limit of the memory that holds the rest.

  scripts/bench.py beyond-memory
  scripts/bench.py beyond-memory --dram-mb 60 --ssd-mb 400 --json out.json
  scripts/bench.py beyond-memory --elsewhere auto

Two real nodes, one after the other, with the same prompts over HTTP: one with a small arena and --beyond-memory on, one
whose arena holds everything. The limit is what reading alone allows: the bytes beyond the arena that each token reads,
over the rate at which one thread of the node reads that tier without computing; the node measures it when it starts.
A step also reads all weights, so the second limit is what reading both allows: the bytes of the weights and of all
blocks, over the rate at which --num-threads threads read memory; what lies on SSD can be read at the same time.
With --ssd-mb and a small --dram-mb, blocks lie on SSD too. Targets: 0.7 of the limit; the node's forecast within 15 %
of the measured time; equal tokens with --dtype float32. In bfloat16 a chunk over cold blocks is rounded as differently
as by another attention backend, and an answer may take the other one of two tokens of nearly equal chance.

With --elsewhere, the first node runs a second time next to a store node that holds blocks for it and attends to them
(--attention-elsewhere): always = as many as it lends, auto = by the rule. Both nodes share the cores of this machine.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from lab.bench.common.client import Client, Outcome, greedy_client, open_session
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, Spec, TokenSource
from lab.bench.engine.floors import Work, chosen_weights, measured_elsewhere
from lab.flag_types import natural, positive
from lab.launch import rest
from lab.launch.cluster import LocalCluster

ROOMY = ("--kv-cache-bytes", "600M")
SLOW = ("--slo", "standard:tbt=60")
"""No objective refuses the benchmark's requests."""

PASSAGE_TOKENS = 150
PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt on one node."""

    token_s: float  # median seconds between its tokens
    ttft_s: float
    forecast_token_s: float  # by the node, before it began
    near_bytes: int  # that each token reads in DRAM
    far_bytes: int  # and on SSD
    held_blocks: int = 0  # on another node


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--arena-mb", type=positive, default=44, help="of the small arena (default %(default)s)")
    parser.add_argument("--dram-mb", type=positive, default=300, help="DRAM share of its node (default %(default)s)")
    parser.add_argument("--ssd-mb", type=natural, default=0, help="its SSD tier; 0 = none (default %(default)s)")
    parser.add_argument(
        "--elsewhere",
        choices=("off", "auto", "always"),
        default="off",
        help="also with blocks on a store node, which is asked about them (default %(default)s)",
    )
    parser.add_argument("--times", type=positive, default=4, help="context / arena (default %(default)s)")
    parser.add_argument("--output-tokens", type=positive, default=64, help="of each answer (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="prompts (default %(default)s)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of model and KV (default %(default)s)"
    )
    parser.add_argument("--num-threads", type=positive, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--seed", type=natural, default=0, help="seed of the prompts (default %(default)s)")
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), rounds=1, arena_mb=12, dram_mb=100, output_tokens=16)


def spec_of(args: Namespace, number: int, tokens: int) -> Spec:
    """One passage again and again: the model goes on with it, and is more sure of the next token than after random
    tokens."""
    passage = TokenSource(args.seed, 32000).tokens(PASSAGE_TOKENS, SUFFIX, number)
    return Spec((passage * (tokens // PASSAGE_TOKENS + 1))[:tokens], args.output_tokens)


async def ask(client: Client, url: str, spec: Spec) -> tuple[Outcome, dict[str, Any]]:
    """The answer, and what its node has said about it."""
    async with asyncio.timeout(PATIENCE_S):
        outcome = await client.ask(spec)
    told = await asyncio.to_thread(rest.get, f"{url}/debug/requests/{outcome.request_id}")
    found = [event["detail"] for event in told["events"] if event["event"] == "beyond_memory"]
    return outcome, found[0] if found else {}


def text_of(url: str, model: str, spec: Spec) -> str:
    body = {"model": model, "prompt": spec.token_ids, "max_tokens": spec.output_len, "temperature": 0}
    return str(rest.post(f"{url}/v1/completions", body | {"ignore_eos": True})["choices"][0]["text"])


async def measure_node(
    args: Namespace, given: Sequence[str], tokens: int | None, nodes: str = "mixed=1"
) -> tuple[list[Answer], list[str], int, dict[str, Any]]:
    """(answers, their texts, tokens of a prompt, state of the node). tokens: None = --times the arena. nodes: the mixed
    one first."""
    answers, texts = list[Answer](), list[str]()
    threads = ("--num-threads", str(args.num_threads), "--dtype", args.dtype)
    with (
        tempfile.TemporaryDirectory(prefix="beyond-") as folder,
        LocalCluster(nodes, (*threads, *SLOW, *given), run_dir=Path(folder)) as cluster,
    ):
        url = cluster["mixed-0"].url
        state = rest.get(f"{url}/debug/state")
        if tokens is None:
            arena = state["engine"]["blocks"]["total"] * state["config"]["block_size"]
            tokens = min(args.times * arena, state["config"]["max_model_len"] - args.output_tokens)
        async with open_session() as session:
            client = await greedy_client(session, "ours", url)
            for number in range(args.rounds):
                spec = spec_of(args, number, tokens)
                outcome, told = await ask(client, url, spec)
                answers.append(
                    Answer(
                        median(outcome.itl_s),
                        outcome.ttft_s,
                        told.get("token_s", 0.0),
                        int(told.get("near_bytes", 0)),
                        int(told.get("far_bytes", 0)),
                        sum(told.get("held_blocks", {}).values()),
                    )
                )
                texts.append(await asyncio.to_thread(text_of, url, client.server.model, spec))
        state = rest.get(f"{url}/debug/state")
    return answers, texts, tokens, state


async def measure(args: Namespace) -> tuple[list[Row], dict[str, Any]]:
    small = (
        "--beyond-memory",
        "on",
        "--kv-cache-bytes",
        f"{args.arena_mb}M",
        "--dram-bytes",
        f"{args.dram_mb}M",
    )
    with tempfile.TemporaryDirectory(prefix="beyond-ssd-") as folder:
        ssd = ("--ssd-path", folder, "--ssd-bytes", f"{args.ssd_mb}M") if args.ssd_mb else ()
        ours, texts, tokens, state = await measure_node(args, (*small, *ssd), None)
    roomy, right, _, roomy_state = await measure_node(args, ROOMY, tokens)
    asked = None
    if args.elsewhere != "off":
        asked = await measure_node(args, (*small, "--attention-elsewhere", args.elsewhere), tokens, "mixed=1,store=1")
    beyond = state["engine"]["beyond_memory"]
    rates = beyond["dram_bytes_per_s"], beyond["ssd_bytes_per_s"]
    found = {
        "answers": [asdict(one) for one in ours],
        "roomy": [asdict(one) for one in roomy],
        "beyond_memory": beyond,
        "servers": {"beyond": state["config"], "roomy": roomy_state["config"]},
    }
    both_s, found["floor"] = floor_s(args, tokens, ours, rates[1], state["config"])
    rows = rows_of(args, ours, roomy, (*rates, both_s), tokens, equal(texts, right))
    if asked is not None:
        answers, asked_texts, _, asked_state = asked
        found["asked"] = [asdict(one) for one in answers]
        found["elsewhere"] = asked_state["engine"]["beyond_memory"]["elsewhere"]
        found["servers"] |= {"asked": asked_state["config"]}
        rows += asked_rows(args, answers, ours, found["elsewhere"], equal(asked_texts, right))
    return rows, found


def floor_s(
    args: Namespace, tokens: int, ours: Sequence[Answer], far_bytes_per_s: float, config: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Seconds in which the weights and all blocks can be read, and what it was computed from."""
    ceilings = measured_elsewhere(args.num_threads, config["dtype"])
    weights = chosen_weights() if config["weight_dtype"] == "auto" else config["weight_dtype"]
    work = Work.of(describe(EMBEDDED_MODEL).config, config["dtype"], weights)
    far = median(one.far_bytes for one in ours)
    in_memory = work.weight_bytes + tokens * work.kv_bytes_per_token - far
    seconds = max(in_memory / ceilings.memory_bytes_per_s, far / far_bytes_per_s if far else 0.0)
    return seconds, {
        "weight_bytes": work.weight_bytes,
        "in_memory_bytes": in_memory,
        "memory_bytes_per_s": ceilings.memory_bytes_per_s,
        "seconds": seconds,
    }


def equal(texts: Sequence[str], right: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(texts, right, strict=True)) / len(right)


def rows_of(
    args: Namespace,
    ours: Sequence[Answer],
    roomy: Sequence[Answer],
    known: tuple[float, float, float],
    tokens: int,
    same: float,
) -> list[Row]:
    """known: bytes/s of DRAM and of SSD, as the node has measured them, and seconds to read weights and blocks."""
    *rates, both_s = known
    token_s = median(one.token_s for one in ours)
    near, far = median(one.near_bytes for one in ours), median(one.far_bytes for one in ours)
    read_s = near / rates[0] + (far / rates[1] if far else 0.0)
    forecast_s = median(one.forecast_token_s for one in ours)
    note = (
        f"contexts of {tokens} tokens, an arena of {args.arena_mb} MB, beyond it {near / 1e6:.0f} MB in DRAM, read at "
        f"{rates[0] / 1e9:.2f} GB/s without computation, and {far / 1e6:.0f} MB on SSD, at {rates[1] / 1e9:.2f} GB/s; "
        "targets: 0.7 of the limit, forecast within 15 %"
    )
    limit = {"reading alone": 1 / read_s, "reading the weights too": 1 / max(read_s, both_s)} if read_s else {}
    fits: dict[str, float | None] = {"arena that holds it": 1 / median(one.token_s for one in roomy)}
    return [
        Row("beyond memory", "decode, one stream", "1/s", 1 / token_s, fits, limit, note),
        Row("beyond memory", "time per token", "ms", 1e3 * token_s, {"its forecast": 1e3 * forecast_s}, note=note),
        Row(
            "beyond memory",
            "TTFT",
            "s",
            median(one.ttft_s for one in ours),
            {"arena that holds it": median(one.ttft_s for one in roomy)},
            note=note,
        ),
        Row("beyond memory", "answers with equal tokens", "share", same, note=note),
    ]


def asked_rows(
    args: Namespace, asked: Sequence[Answer], streamed: Sequence[Answer], did: dict[str, Any], same: float
) -> list[Row]:
    """did: what the node has asked of the other one."""
    token_s, alone_s = (median(one.token_s for one in some) for some in (asked, streamed))
    per_ask = (did["query_bytes"] + did["part_bytes"]) / max(1, did["asks"])
    note = (
        f"--attention-elsewhere {args.elsewhere}: {median(one.held_blocks for one in asked):.0f} blocks on a store "
        f"node on the same cores, {did['asks']} asks of {per_ask / 1e3:.1f} KB, {did['fallbacks']} fallbacks"
    )
    forecast_s = median(one.forecast_token_s for one in asked)
    return [
        Row("asked elsewhere", "decode, one stream", "1/s", 1 / token_s, {"on one node": 1 / alone_s}, note=note),
        Row("asked elsewhere", "time per token", "ms", 1e3 * token_s, {"its forecast": 1e3 * forecast_s}, note=note),
        Row(
            "asked elsewhere",
            "TTFT",
            "s",
            median(one.ttft_s for one in asked),
            {"on one node": median(one.ttft_s for one in streamed)},
            note=note,
        ),
        Row("asked elsewhere", "answers with equal tokens", "share", same, note=note),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    try:
        rows, found = asyncio.run(measure(args))
    except KeyboardInterrupt:
        return 130
    used = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report({"benchmark": "beyond-memory", **used, **found}, rows, args.json)
    return 0
