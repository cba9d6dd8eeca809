"""How long the largest allowed API requests block the event loop of a serving node for others.

  scripts/bench.py requests
  scripts/bench.py requests --json out.json

One real node with the embedded model. Every kind of large request is sent alone, --times in a row. Meanwhile another
connection requests /health every 5 ms; its slowest answer shows the delay of other clients. The goal is 50 ms. The
names of refused requests contain their status. Exit code 1 if an answer has another status than its name says.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from lab.bench.common.results import Row, add_result_flags, quicken, write_result
from lab.flag_types import positive
from lab.launch.cluster import LocalCluster

GOAL_MS = 50.0
PERIOD_S = 0.005
NODE_FLAGS = ("--kv-cache-bytes", "400M", "--dram-bytes", "32M")


IDS = [100 + i % 5000 for i in range(1900)]
BIASES = {str(i): 1 for i in range(4096)}
CHAT = {"messages": [{"role": "user", "content": "Count."}]}
WORDS = [f"{i} words that the answer must not have, {i}" for i in range(256)]
LONG_STOPS = ["a" * (1023 - i) + "b" for i in range(16)]
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"enum": list(range(2000))}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = [TOOL] * 128
ASKED = {"input": "Count.", "max_output_tokens": 4, "tools": [{"type": "function"} | FUNCTION] * 128}
OFFERED = [{"name": "f", "input_schema": FUNCTION["parameters"]}] * 128
LARGE_FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"enum": list(range(280_000))}}
LARK = "start: " + " | ".join(f'"{i:06}"' for i in range(2800))
SCHEMA = {"type": "object", "properties": {f"field_{i}": {"enum": [i, str(i)]} for i in range(3000)}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt_logprobs 20 x n 6": ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 20, "n": 6, "max_tokens": 1}),
    "echo with logprobs 20": ("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 20, "max_tokens": 0}),
    "chat, top_logprobs 20": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20, "max_tokens": 200}),
    "4,096 biases": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": BIASES}),
    "4,096 biases x n 16": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": BIASES, "n": 16}),
    "4,096 biases x n 128 (400)": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logit_bias": BIASES, "n": 128}),
    "4,096 allowed ids x n 16": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 4, "allowed_token_ids": list(range(4096)), "n": 16},
    ),
    "256 bad words x n 8": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "bad_words": WORDS, "n": 8}),
    "256 bad words x n 128 (400)": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "bad_words": WORDS, "n": 128}),
    "1,900 tokens x n 128, ids shown": (
        "/v1/completions",
        {"prompt": IDS, "max_tokens": 1, "n": 128, "return_token_ids": True},
    ),
    "200 prompts": ("/v1/completions", {"prompt": [f"Number {i}" for i in range(200)], "max_tokens": 1}),
    "300 prompts (429)": ("/v1/completions", {"prompt": [f"Number {i}" for i in range(300)], "max_tokens": 1}),
    "1,024 choices (429)": ("/v1/completions", {"prompt": ["a"] * 8, "n": 128, "max_tokens": 1}),
    "16 stops of 1,024 x n 64": (
        "/v1/completions",
        {"prompt": "a" * 99, "stop": LONG_STOPS, "n": 64, "max_tokens": 32},
    ),
    "a schema of 3,000 fields": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 4, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ),
    "a choice of 1,024": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 4, "guided_choice": [f"{i}" * 40 for i in range(1024)]},
    ),
    "a regex of 256 KiB": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_regex": "ab|c" * (64 << 10)}),
    "a Lark grammar of 32 KB": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_grammar": LARK}),
    "a GBNF grammar of 32 KB": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 4, "guided_grammar": LARK.replace("start:", "root ::=")},
    ),
    "128 tools of 2,000 values (400)": ("/v1/chat/completions", CHAT | {"tools": TOOLS, "max_tokens": 1}),
    "a tool of 280,000 values (400)": (
        "/v1/chat/completions",
        CHAT | {"max_tokens": 1, "tools": [{"type": "function", "function": LARGE_FUNCTION}]},
    ),
    "responses, 128 tools shown": ("/v1/responses", ASKED | {"tool_choice": "none"}),
    "responses, 128 tools streamed": ("/v1/responses", ASKED | {"tool_choice": "none", "stream": True}),
    "responses, a tool of 280,000": (
        "/v1/responses",
        ASKED | {"tool_choice": "none", "tools": [{"type": "function"} | LARGE_FUNCTION]},
    ),
    "responses, 128 tools (400)": ("/v1/responses", ASKED),
    "messages, 128 tools unused": (
        "/v1/messages",
        CHAT | {"max_tokens": 4, "tools": OFFERED, "tool_choice": {"type": "none"}},
    ),
    "messages, 128 tools (400)": ("/v1/messages", CHAT | {"max_tokens": 4, "tools": OFFERED}),
    "count_tokens, 128 tools": ("/v1/messages/count_tokens", CHAT | {"tools": OFFERED}),
    "drain, 290,000 values (400)": ("/drain", {"timeout_s": [0] * 290_000}),
    "a batch of 290,000 values (404)": ("/v1/batches", {"input_file_id": [0] * 290_000}),
    "new weights, 290,000 values (400)": ("/v1/update_weights", {"prefix": [0] * 290_000}),
    "detokenize 290,000": ("/detokenize", {"tokens": (IDS * 200)[:290_000]}),
    "tokenize 2 MB": ("/tokenize", {"prompt": "so many words " * 140_000, "return_token_strs": True}),
    "tokenize 2 MB, a token each": ("/tokenize", {"prompt": "?!" * 1_000_000}),
    "tokenize 4 MB (413)": ("/tokenize", {"prompt": "so many words " * 290_000}),
    "a prompt of 2 MB (400)": ("/v1/completions", {"prompt": "so many words " * 140_000}),
    "a chat of 2 MB of < (400)": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<" * 1_999_000}]}),
    "4,096 messages (400)": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 4096}),
    "60,000 messages (400)": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 60_000}),
    "400,000 biases (413)": ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(400_000)}}),
    "prompt_logprobs 20 x n 128 (400)": ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 20, "n": 128}),
}


def flags(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", default="", metavar="TEXT", help="only requests whose name contains TEXT")
    parser.add_argument(
        "--times", type=positive, default=3, help="how often every request is sent (default %(default)s)"
    )
    add_result_flags(parser)
    return quicken(parser.parse_args(argv), times=1)


def chosen(only: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: one for name, one in REQUESTS.items() if only in name}


def named_status(name: str) -> int:
    """The status of the answers, as the name of the requests says."""
    found = re.search(r"\((\d{3})\)$", name)
    return int(found[1]) if found else 200


async def longest_health(url: str, over: threading.Event) -> float:
    """Seconds of the slowest /health answer until `over` is set."""
    longest = 0.0
    async with aiohttp.ClientSession(url) as session:
        while not over.is_set():
            begun = time.perf_counter()
            async with session.get("/health") as response:
                await response.read()
            longest = max(longest, time.perf_counter() - begun)
            await asyncio.sleep(PERIOD_S)
    return longest


def watched(url: str, over: threading.Event) -> float:
    """Runs `longest_health` in a separate thread and loop, so that the sender does not disturb it."""
    return asyncio.run(longest_health(url, over))


async def measure(args: Namespace, url: str) -> tuple[list[Row], list[str]]:
    """(rows, requests that got another status than their name says)"""
    rows: list[Row] = []
    wrong: list[str] = []
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for name, (path, body) in chosen(args.only).items():
            over, data = threading.Event(), orjson.dumps(body)
            statuses: set[int] = set()
            watch = asyncio.create_task(asyncio.to_thread(watched, url, over))
            await asyncio.sleep(0.2)
            for _ in range(args.times):
                async with session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
                    size = len(await response.read())
                    statuses.add(response.status)
            over.set()
            longest = await watch
            if statuses != {named_status(name)}:
                wrong.append(f"{name}: status {sorted(statuses)}")
            note = f"status {response.status}, {len(data) / 1e6:.2f} MB asked, {size / 1e6:.2f} MB answered"
            rows.append(
                Row(name, "longest /health", "ms", round(1000 * longest, 1), limits={"goal": GOAL_MS}, note=note)
            )
            print(f"{name:<34} {1000 * longest:8.1f} ms  {note}", flush=True)
    return rows, wrong


async def run(args: Namespace, folder: Path) -> tuple[list[Row], list[str]]:
    async with LocalCluster("mixed=1", NODE_FLAGS, run_dir=folder) as cluster:
        url = cluster.nodes[0].url
        first = {"prompt": "a", "max_tokens": 8}  # first steps are slow
        async with aiohttp.ClientSession(url) as session, session.post("/v1/completions", json=first) as response:
            response.raise_for_status()
        return await measure(args, url)


def main(argv: Sequence[str] | None = None) -> int:
    args = flags(argv)
    with tempfile.TemporaryDirectory(prefix="requests-") as folder:
        rows, wrong = asyncio.run(run(args, Path(folder)))
    if args.json is not None:
        write_result({"benchmark": "requests", "times": args.times}, rows, args.json)
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0
