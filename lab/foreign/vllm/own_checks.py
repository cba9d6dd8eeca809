"""Our own connector in vLLM: one pool of two processes; a process that computes prompts, and one that decodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from lab.bench.common.client import GREEDY, Unreachable, open_session
from lab.foreign.common.checks import ANSWER_TOKENS, BLOCK_TOKENS, Checks
from lab.foreign.common.completions import JSON, Answer, ask, ask_together
from lab.foreign.common.our_pool import OurPool, our_pool
from lab.foreign.vllm.engines import Engine, Say
from lab.foreign.vllm.own import metrics, with_own_connector
from lab.foreign.vllm.store_checks import DOCUMENTS, KILL_AFTER_S, VALUE_BYTES, StoreChecks

LONG_ANSWERS = [(document, question) for document in (0, 1, 2, 3) for question in (1, 2)]
LONG_ANSWER_TOKENS = 160
TIGHT_MODEL_LEN = 4608
DAMAGED, EVERY_BYTES = "store-2", 3_000_000
ABORT_AFTER_S = (0.02, 0.1, 0.3, 0.6)
QUIET_S = 60.0
WAIT_S = 60.0
"""The decoding process waits so long for blocks of the other one, which computes several prompts on one core."""


def check_own(engine: Engine, packages: Path, checks: Checks, say: Say) -> None:
    """Two vLLM processes on three store nodes; then all of them again, the second with too little KV memory."""
    with our_pool(_folder(engine, "own"), VALUE_BYTES) as pool:
        settings = with_own_connector(packages, pool.addresses)
        say("own: starting two vLLM processes on three store nodes")
        with engine.running({"one": settings, "two": settings}, say) as running:
            one, two = running["one"].url, running["two"].url
            store = StoreChecks(pool, one, two, checks, "own")
            store.share()
            for round_number, after_s in enumerate(KILL_AFTER_S):
                store.lose_a_node(2 + 2 * round_number, after_s)
            _counted(checks, one, two)
            _aborted(checks, one)
        say("own: all processes end and start again")
        pool.restart()
        settings = with_own_connector(packages, pool.addresses)
        few = ("--num-gpu-blocks-override", str(_few_blocks(checks)), "--max-model-len", str(TIGHT_MODEL_LEN))
        tight = with_own_connector(packages, pool.addresses, "kv_both", *few)
        with engine.running({"one": settings, "two": tight}, say) as running:
            one, two = running["one"].url, running["two"].url
            StoreChecks(pool, one, two, checks, "own").begin_again()
            _preempted(checks, one, two)
            _damaged(checks, pool, one)


def _folder(engine: Engine, name: str) -> Path:
    """Of a pool with blocks of its own."""
    folder = engine.run_dir / name
    folder.mkdir()
    return folder


def _few_blocks(checks: Checks) -> int:
    """Of vLLM's KV memory: enough for the prompts of LONG_ANSWERS and too few for their answers, which need one block
    each."""
    documents = len({document for document, _ in LONG_ANSWERS})
    return documents * checks.questions.shared_tokens // BLOCK_TOKENS + len(LONG_ANSWERS) + len(LONG_ANSWERS) // 2


def _counted(checks: Checks, one: str, two: str) -> None:
    """What both have told since their start."""
    seen = metrics(one) + metrics(two)
    names = ("saved_blocks", "load_blocks", "loads_by_layer", "loads_failed", "saves_failed", "save_blocks_dropped")
    ours = {name: int(seen[f"vllm:mooncake_{name}_total"]) for name in names}
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    host, nameless = seen[f"{by_source} host"], seen[f"{by_source} external_unspecified"]
    passed = ours["saved_blocks"] > 0 and ours["load_blocks"] > 0 and host > 0 and nameless == 0
    told = ", ".join(f"{name} {count}" for name, count in ours.items())
    checks.say(
        "own: its metrics", passed, f"{told}; tokens from DRAM of the pool {host:.0f}, without a source {nameless:.0f}"
    )


def _aborted(checks: Checks, url: str) -> None:
    """Clients that leave while their prompt is loaded, computed or saved."""
    questions = [checks.questions(100 + number, 0) for number in range(len(ABORT_AFTER_S))]

    async def leave(prompt: list[int], after_s: float) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": 500, "stream": True, **GREEDY}
        async with open_session() as session:
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(after_s),
                    session.post(f"{url}/v1/completions", data=orjson.dumps(body), headers=JSON) as answer,
                ):
                    await answer.read()

    async def all_leave() -> None:
        for prompt in questions:
            await asyncio.gather(*(leave(prompt, after_s) for after_s in ABORT_AFTER_S))

    asyncio.run(all_leave())
    deadline = time.monotonic() + QUIET_S
    while (seen := _in_use(url)) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    ask(url, checks.questions(0, 0), ANSWER_TOKENS)  # it lives
    left = f"{seen[0]:.0f} requests and {seen[1]:.4f} of the KV memory in use afterwards"
    checks.say("own: aborted requests leave nothing", seen == (0, 0), left)


def _in_use(url: str) -> tuple[float, float]:
    seen = metrics(url)
    return (
        seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"],
        seen["vllm:kv_cache_usage_perc"],
    )


def _preempted(checks: Checks, roomy: str, tight: str) -> None:
    """Long answers of many requests at once: vLLM takes blocks of some away for others, and begins them again."""
    prompts = [checks.questions(*key) for key in LONG_ANSWERS]
    expected = [ask(roomy, prompt, LONG_ANSWER_TOKENS).tokens for prompt in prompts]
    before = metrics(tight)["vllm:num_preemptions_total"]
    answers = asyncio.run(ask_together([(tight, prompt, 0.0) for prompt in prompts], LONG_ANSWER_TOKENS))
    preemptions = metrics(tight)["vllm:num_preemptions_total"] - before
    wrong = [i for i, (answer, tokens) in enumerate(zip(answers, expected, strict=True)) if answer.tokens != tokens]
    note = f"{preemptions:.0f} preemptions" + (f"; other tokens for {wrong}" if wrong else "")
    checks.say("own: preempted requests", not wrong and preemptions > 0, note)


def _damaged(checks: Checks, pool: OurPool, url: str) -> None:
    """The blocks of one node are damaged on SSD. It finds that out when they are loaded: vLLM has believed in them."""
    pool.cluster.kill(DAMAGED)
    _flip_bytes(pool.ssd(DAMAGED) / "data.mdb")
    pool.start_again(DAMAGED)
    before = metrics(url)
    keys = [(document, 2) for document in range(4, DOCUMENTS)]
    answers = {key: ask(url, checks.questions(*key), ANSWER_TOKENS) for key in keys}
    checks.compare(f"own: the blocks of {DAMAGED} are damaged on SSD", answers)
    seen = metrics(url)
    failed, blocks = (int(_grown(seen, before, name)) for name in ("loads_failed", "load_blocks_failed"))
    checks.say("own: blocks that did not come were computed", failed > 0, f"{failed} failed loads, {blocks} blocks")


def _grown(seen: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    return seen[f"vllm:mooncake_{name}_total"] - before[f"vllm:mooncake_{name}_total"]


def _flip_bytes(path: Path) -> None:
    """Some in every block, which has more than EVERY_BYTES. The first pages are the file's own."""
    with path.open("r+b") as file:
        for at in range(EVERY_BYTES // 2, path.stat().st_size, EVERY_BYTES):
            file.seek(at)
            old = file.read(8)
            file.seek(at)
            file.write(bytes(byte ^ 0xFF for byte in old))


def check_own_pair(engine: Engine, packages: Path, checks: Checks, say: Say) -> None:
    """A process that computes prompts and one that decodes, each asked by the client, without a proxy."""
    with our_pool(_folder(engine, "own-pair"), VALUE_BYTES) as pool:
        both = {
            "prefill": with_own_connector(packages, pool.addresses, "kv_producer"),
            "decode": with_own_connector(packages, pool.addresses, "kv_consumer", wait_s=WAIT_S),
        }
        say("own-pair: starting two vLLM processes on three store nodes")
        with engine.running(both, say) as running:
            pair = _Pair(running["prefill"].url, running["decode"].url, checks)
            pair.one_after_the_other()
            pair.at_the_same_time()
            pair.without_the_first()


class _Pair:
    """Each document is new to both processes."""

    def __init__(self, prefill: str, decode: str, checks: Checks) -> None:
        self._prefill, self._decode, self._checks = prefill, decode, checks

    def one_after_the_other(self) -> None:
        """The second gets what the first says of the request. Its answer then tells how much of the prompt the first
        had in its cache, so what came from the pool is seen in the metrics only."""
        told = asyncio.run(_parameters(self._prefill, self._checks.questions(0, 0)))
        before = metrics(self._decode)
        answer = ask(self._decode, self._checks.questions(0, 0), ANSWER_TOKENS, {"kv_transfer_params": told})
        self._checks.compare("own-pair: a prompt computed by the one, then decoded by the other", {(0, 0): answer})
        blocks = int(_grown(metrics(self._decode), before, "load_blocks"))
        enough = blocks >= self._checks.questions.shared_tokens // BLOCK_TOKENS
        self._checks.say("own-pair: its blocks came from the pool", enough, f"{blocks} blocks loaded")

    def at_the_same_time(self) -> None:
        """Both get the same prompts; nothing else is said."""
        keys = [(1, 0), (2, 0), (2, 1)]
        prompts = [self._checks.questions(*key) for key in keys]
        first = [(self._prefill, prompt, 0.0) for prompt in prompts]
        then = [(self._decode, prompt, 0.0) for prompt in prompts]

        async def both() -> list[Answer]:
            decoded, _ = await asyncio.gather(ask_together(then, ANSWER_TOKENS), ask_together(first, 1))
            return decoded

        answers = dict(zip(keys, asyncio.run(both()), strict=True))
        self._checks.compare("own-pair: both asked at the same time", answers, cached=True)
        seen = metrics(self._decode)
        waits, in_vain = (int(seen[f"vllm:mooncake_{name}_total"]) for name in ("waits", "waits_in_vain"))
        note = f"{waits} requests waited for their blocks, {in_vain} in vain"
        self._checks.say("own-pair: the second waited for the first", waits >= 1 and in_vain == 0, note)

    def without_the_first(self) -> None:
        """Nobody computes the prompt."""
        begun = time.monotonic()
        answers = {(3, 0): ask(self._decode, self._checks.questions(3, 0), ANSWER_TOKENS)}
        seconds = time.monotonic() - begun
        self._checks.compare("own-pair: a prompt that nobody computes", answers, cached=False)
        note = f"{seconds:.1f} s, of which {WAIT_S:.0f} s waiting"
        self._checks.say("own-pair: it is computed after the deadline", seconds >= WAIT_S, note)


async def _parameters(url: str, prompt: list[int]) -> Mapping[str, Any]:
    """What a process that computes prompts says to the one that decodes. Raises Unreachable."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, **GREEDY}
    async with (
        open_session() as session,
        session.post(f"{url}/v1/completions", data=orjson.dumps(body), headers=JSON) as answer,
    ):
        told = (await answer.json()).get("kv_transfer_params")
    if not told:
        raise Unreachable(f"{url} says no kv_transfer_params")
    return dict(told)
