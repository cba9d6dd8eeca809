"""prefill=1,decode=1 without any store: the next turn of a chat finds the last answer where it was decoded, and reads
it out of that node's arena."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.observe.explain import table
from lab.faults.checks import form
from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled, timeline, wait_until

SEED = 20261122
BLOCK = 16
IDS = {"ignore_eos": True, "return_token_ids": True}


def turn(url: str, prompt: list[int], count: int, **body: Any) -> tuple[list[int], str]:
    """Tokens of the answer, and the request id."""
    answer = complete(url, prompt, count, **IDS, **body)
    return answer["choices"][0]["token_ids"], answer["id"]


def test_the_next_turn_finds_the_answer_of_the_last_one(start: Start):
    """The embedded model, and what --prefix-fetch auto thinks of it."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-bytes", "400M")
    with start("prefill=1,decode=1", *flags) as cluster:
        url = cluster["prefill-0"].url
        prompt = [rng.randrange(1000, 40_000) for _ in range(290)]
        answer, _ = turn(url, prompt, 110)
        longer = [*prompt, *answer, *(rng.randrange(1000, 40_000) for _ in range(12))]
        found, request_id = turn(url, longer, 16)

        told = timeline(url, request_id)
        known = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK  # the KV of its last token was never needed
        assert told["summary"]["cached_tokens"] == known == 384
        (load,) = [event["detail"] for event in told["events"] if event["event"] == "prefix_fetched"]
        blocks = known // BLOCK - len(prompt) // BLOCK
        assert load["tiers"] == {"arena": blocks} and load["sources"] == {"decode-0": blocks}
        assert f"loaded {blocks} blocks ({blocks} arena) from decode-0" in table(told)

        cold, _ = turn(url, longer, 16, cache_salt="cold")
        assert found == cold
        settled(cluster)


def test_the_death_of_the_source_in_the_middle_of_the_load_is_a_pause(start: Start, tiny_model: list[str]):
    """kill -9 while its blocks are read, and a restart: the request is computed, and its tokens are the same."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    slow = {"prefill": ("--rail-limit", "300000")}  # bytes/s: the answer's blocks take a second
    flags = ("--prefix-fetch", "always")
    with start("prefill=1,decode=1", *tiny_model, *flags, role_flags=slow) as cluster:
        url = cluster["prefill-0"].url
        prompt = [rng.randrange(1000, 40_000) for _ in range(200)]
        answer, _ = turn(url, prompt, 400)
        longer = [*prompt, *answer, 5]
        calm, _ = turn(url, longer, 40, cache_salt="calm")
        settled(cluster)

        def lent() -> bool:
            return bool(rest.get(f"{cluster['decode-0'].url}/debug/state")["engine"]["held_for_requests"]["lent"])

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(turn, url, longer, 40)
            wait_until(lent, "the decode node lends its blocks")
            cluster.repeat("decode-0")
            found, request_id = running.result()
        assert found == calm
        events = [event["event"] for event in timeline(url, request_id)["events"]]
        assert "attempt_failed" in events and "prefix_fetched" not in events
        form(cluster)
        settled(cluster)
