"""Two sites: a prefix that crosses the link once is used once, crossing twice makes a copy, and the KV of a tenant that
is bound to its site never crosses. A site whose computing nodes are gone still serves the other one from its pool."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled, timeline, wait_until

SEED = 20261129
BLOCK = 16
ARENA_TOKENS = 480
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4  # of the embedded model in float32
PROMPT, BLOCKS = 200, 12
TTL_S = 15.0
"""Of copies. On a busy machine the pauses between reads may be longer: the test says what must happen then, too."""
ASKED_MAX = 20
IDS = {"ignore_eos": True, "return_token_ids": True}

FLAGS = (
    *("--dtype", "float32", "--max-model-len", "480", "--kv-cache-bytes", str(ARENA_TOKENS * TOKEN_BYTES)),
    *(
        "--site-link-limit-bytes",
        "200M",
        "--site-copy-ttl-ms",
        str(round(1000 * TTL_S)),
        "--site-bound-tenants",
        "bank",
    ),
    *("--dram-bytes", "0", "--calibration-ms", "500", "--net", "local"),
)
EAST, WEST = ("--site", "east"), ("--site", "west")
POOL = ("--dram-bytes", "512M")
WHERE = {"mixed-0": EAST, "mixed-1": WEST, "store-0": (*EAST, *POOL), "store-1": (*WEST, *POOL)}


def ask(url: str, prompt: list[int], **body: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens of the answer, and the prefixes that were fetched for it."""
    answer = complete(url, prompt, 8, **IDS, **body)
    told = timeline(url, answer["id"])
    return answer["choices"][0]["token_ids"], [
        event["detail"] for event in told["events"] if event["event"] == "prefix_fetched"
    ]


@dataclass
class Reads:
    """Reads of one prefix at a site that did not compute it. Only what is read again within the TTL, measured from the
    begin of one read to the end of the next, may be demanded of a copy."""

    ended: list[tuple[float, float]] = field(default_factory=list)  # (begin, end) of each that crossed

    def crossed(self, begin: float, end: float) -> None:
        assert self.may_cross(end), "it crossed twice within the TTL, and was read within the TTL: a copy"
        self.ended.append((begin, end))

    def may_cross(self, end: float) -> bool:
        """Whether a read that ends now may cross the link: it is the first or second one, or a pause was too long."""
        if len(self.ended) < 2:
            return True
        (before, _), (last, last_end) = self.ended[-2:]
        return last_end - before >= TTL_S or end - last >= TTL_S


def crossed(url: str) -> float:
    """Bytes that the node has read from other sites."""
    lines = rest.text(f"{url}/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("mooncake:site_link_bytes_total{"))


def in_pool(cluster: LocalCluster, name: str) -> int:
    """Blocks in the DRAM of this share."""
    stats = rest.get(f"{cluster[name].url}/debug/state")["store"]
    return int(stats["dram"]["blocks"])


@pytest.mark.timeout(900)  # a read and the prompt that evicts it take 20 s on two busy cores
def test_prefixes_cross_by_the_rules_and_a_bound_tenant_does_not(start: Start):
    rng = random.Random(SEED)
    print(f"seed {SEED}")

    def some(tokens: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(tokens)]

    prompt, secret = some(PROMPT), some(PROMPT)
    with start("mixed=1,store=2", *FLAGS, role_flags=WHERE) as cluster:
        east = cluster["mixed-0"].url
        ask(east, prompt)  # before the west can compute: it might be faster
        kept, _ = ask(east, secret, cache_salt="bank")
        settled(cluster)
        assert in_pool(cluster, "store-0") >= 2 * BLOCKS, "a writer's blocks have their home at its site"
        assert in_pool(cluster, "store-1") == 0
        west = cluster.add("mixed", name="mixed-1").url
        cluster.kill("mixed-0")
        wait_until(lambda: len(rest.get(f"{west}/cluster")["members"]) == 3, "the west knows that mixed-0 is gone")

        def forget() -> None:
            ask(west, some(468), cache_salt="bank")
            settled(cluster)

        reads, answers, site = Reads(), [], "east"
        while site is not None:
            assert len(answers) < ASKED_MAX, "this machine pauses too long between reads"
            begin = time.monotonic()
            answer, loads = ask(west, prompt)
            answers.append(answer)
            (load,) = loads
            site = load.get("site")
            assert site in ("east", None) and load["blocks"] == BLOCKS
            if site is not None:
                reads.crossed(begin, time.monotonic())
                forget()
            assert crossed(west) == len(reads.ended) * BLOCKS * BLOCK * TOKEN_BYTES
        assert len(reads.ended) >= 2, "what crossed once is no copy"
        cold, _ = ask(west, prompt, cache_salt="cold")
        assert answers == [cold] * len(answers)

        again, loads = ask(west, secret, cache_salt="bank")
        assert again == kept and loads == [], "it is computed, although the other site has it"
        assert crossed(west) == len(reads.ended) * BLOCKS * BLOCK * TOKEN_BYTES

        copied = in_pool(cluster, "store-1")
        wait_until(lambda: in_pool(cluster, "store-1") <= copied - BLOCKS, "copies leave if nobody reads them", 120.0)
        settled(cluster)


@pytest.mark.timeout(600)  # likewise
def test_a_request_for_a_site_that_says_nothing_goes_to_another_at_once(start: Start):
    """It was found out node by node before, when gossip suspected them: each took a second or two."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    flags = [flag if flag != "200M" else "0" for flag in FLAGS]
    with start("mixed=2", *flags, role_flags=WHERE) as cluster:
        east, west = cluster["mixed-0"].url, cluster["mixed-1"].url

        def nodes_of(prompt: list[int]) -> list[str]:
            """Where an acceptor in the east places it, one after the other."""
            told = timeline(east, complete(east, prompt, 4, **IDS)["id"])["events"]
            return [event["detail"]["prefill"] for event in told if event["event"] == "placed"]

        prompts: list[list[int]] = []

        def west_is_known() -> bool:
            prompts.append([rng.randrange(1000, 40_000) for _ in range(400)])
            complete(west, prompts[-1], 4, **IDS)
            time.sleep(0.5)  # gossip tells where the prefix is
            return nodes_of(prompts[-1]) == ["mixed-1"]

        wait_until(west_is_known, "a request goes to the site that has its prefix", 200.0)
        os.kill(cluster["mixed-1"].pid, signal.SIGSTOP)
        try:
            assert nodes_of(prompts[-1]) == ["mixed-0"]
        finally:
            os.kill(cluster["mixed-1"].pid, signal.SIGCONT)
