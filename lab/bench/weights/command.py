"""New weights for a running cluster: how long preparing takes, what streams notice, and how long the switch is.

    scripts/bench.py weights [--quick] [--json PATH]

A prefill, a decode and a store node serve the embedded model. A trainer in a process of its own puts two sets of its
tensors (bfloat16) through mooncake.store; then POST /v1/update_weights goes from one to the other, --rounds times on an
idle cluster, and --rounds times while one stream runs. The longest gap of that stream stands next to that of a stream
which runs equally long without a replacement; the first token of a request that is sent when the cluster has switched
stands next to that of a request without one. Then the stream is cut off.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from engine.checkpoint.model_source import describe
from engine.checkpoint.safetensors_weights import checkpoint_names
from engine.checkpoint.weights import open_weights
from engine.config.config import EMBEDDED_MODEL
from lab.bench.common.client import Client, Outcome, greedy_client
from lab.bench.common.results import Row, add_result_flags, quicken, report
from lab.bench.common.workload import SUFFIX, WARMUP, Spec, TokenSource
from lab.conformance.answers import SITE
from lab.flag_types import positive
from lab.launch.cluster import LocalCluster

PROGRAM = Path(__file__).with_name("trainer_program.py")
PREFIXES = ("a/", "b/")
NODES = "prefill=1,decode=1,store=1"
FLAGS = ("--kv-cache-bytes", "400M", "--max-model-len", "4096")
STORE_FLAGS = ("--dram-bytes", "2G")
PROMPT_TOKENS, FIRST_TOKENS = 128, 20


@dataclass(slots=True)
class Measured:
    """Seconds. `updates`: answers of POST /v1/update_weights, with `wall_s`."""

    put: list[float] = field(default_factory=list)
    nbytes: int = 0
    updates: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"idle": [], "one stream": []})
    gaps: dict[str, list[float]] = field(default_factory=lambda: {"with": [], "without": []})
    first: dict[str, list[float]] = field(default_factory=lambda: {"with": [], "without": []})


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser("bench.py weights", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add_result_flags(parser)
    parser.add_argument("--rounds", type=positive, default=5, help="replacements of each kind (default %(default)s)")
    parser.add_argument("--tokens", type=positive, default=3000, help="of a stream, at most (default %(default)s)")
    return quicken(parser.parse_args(argv), rounds=1)


def checkpoint(path: Path) -> int:
    """Write the embedded model's tensors as a trainer has them; returns their bytes."""
    import torch
    from safetensors.torch import save_file

    source = describe(EMBEDDED_MODEL)
    with open_weights(source, torch.bfloat16, None) as reader:
        names = checkpoint_names(reader.shapes(), source.config)
        tensors = {names[ours][0]: reader.read(ours).to(torch.bfloat16).contiguous() for ours in reader.shapes()}
    save_file(tensors, path)
    return sum(tensor.nbytes for tensor in tensors.values())


def train(address: str, path: Path) -> list[float]:
    """Seconds of the puts of both sets. Raises RuntimeError if the trainer failed."""
    command = [sys.executable, str(PROGRAM), address, str(path), *PREFIXES]
    env = os.environ | {"PYTHONPATH": str(SITE)}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


async def update(session: aiohttp.ClientSession, url: str, prefix: str) -> dict[str, Any]:
    """Raises RuntimeError if the cluster refuses."""
    begun = time.perf_counter()
    async with session.post(f"{url}/v1/update_weights", json={"prefix": prefix, "version": prefix}) as answer:
        told: dict[str, Any] = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"the update to {prefix} answered {answer.status}: {told}")
    return told | {"wall_s": time.perf_counter() - begun}


async def measure(args: Namespace, run_dir: Path) -> tuple[Measured, dict[str, Any]]:
    found = Measured()
    path = run_dir / "model.safetensors"
    found.nbytes = checkpoint(path)
    role_flags = {"store": STORE_FLAGS}
    async with (
        LocalCluster(NODES, FLAGS, run_dir=run_dir, role_flags=role_flags) as cluster,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
    ):
        door, store = cluster["decode-0"].url, cluster["store-0"].url
        found.put = await asyncio.to_thread(train, store.removeprefix("http://"), path)
        client, source = await greedy_client(session, "node", door), TokenSource(0, 32_000)
        await client.ask(Spec(source.tokens(PROMPT_TOKENS, WARMUP, 0), 8))
        for number in range(args.rounds):
            found.updates["idle"].append(await update(session, store, PREFIXES[number % 2]))
        for number in range(args.rounds):
            await _with_a_stream(found, client, source, number, args.tokens, None)
            turn = PREFIXES[(args.rounds + number) % 2]
            await _with_a_stream(found, client, source, number, args.tokens, (session, store, turn))
        return found, client.server.config or {}


async def _with_a_stream(
    found: Measured,
    client: Client,
    source: TokenSource,
    number: int,
    tokens: int,
    asked: tuple[aiohttp.ClientSession, str, str] | None,
) -> None:
    """A stream, and a short request while it runs: when its weights were replaced, or after as much time as that takes
    on an idle cluster."""
    name, stream = "without" if asked is None else "with", Outcome()
    running = asyncio.create_task(client.send(Spec(source.tokens(PROMPT_TOKENS, SUFFIX, 2 * number), tokens), stream))
    while len(stream.itl_s) < FIRST_TOKENS and not running.done():  # noqa: ASYNC110 - of a client
        await asyncio.sleep(0.005)
    if asked is not None:
        found.updates["one stream"].append(await update(*asked))
    else:
        await asyncio.sleep(median(one["wall_s"] for one in found.updates["idle"]))
    short = await client.ask(Spec(source.tokens(PROMPT_TOKENS, SUFFIX, 2 * number + 1), 2))
    if running.done():
        raise RuntimeError(f"the stream ended too early ({stream.error}): give more --tokens")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    found.gaps[name].append(max(stream.itl_s[FIRST_TOKENS:]))
    found.first[name].append(short.ttft_s)


def rows_of(found: Measured) -> list[Row]:
    """Medians."""
    rows = [Row(f"put of {found.nbytes >> 20} MiB", "time", "s", median(found.put))]
    for case, updates in found.updates.items():
        for metric, unit, factor, pick in (
            ("whole replacement", "s", 1.0, lambda one: one["wall_s"]),
            ("prepare", "s", 1.0, lambda one: one["prepare_s"]),
            ("of that, reading and converting", "s", 1.0, _read_s),
            ("switch", "ms", 1000.0, lambda one: one["switch_s"]),
        ):
            rows.append(Row(f"update, {case}", metric, unit, factor * median(map(pick, updates))))
    for metric, both in (("longest gap of the stream", found.gaps), ("TTFT of the next request", found.first)):
        ours, without = (1000 * median(both[name]) for name in ("with", "without"))
        rows.append(Row("one stream", metric, "ms", ours, {"no replacement": without}))
    return rows


def _read_s(told: Mapping[str, Any]) -> float:
    return max(float(node["read_s"]) for node in told["nodes"].values())


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        found, config = asyncio.run(measure(args, Path(folder)))
    settings = {"benchmark": "weights", "rounds": args.rounds, "tokens": args.tokens, "server": config}
    report(settings, rows_of(found), args.json)
    return 0
