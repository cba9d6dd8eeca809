"""The KV of a session between its turns: on a prefill, a decode and a store node, whose DRAM is too small for all."""

from __future__ import annotations

import random
from typing import Any

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled, timeline, wait_until

SEED = 20261129
BLOCK = 16
BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * BLOCK  # of the tiny model
ARENA_BLOCKS, DRAM_BLOCKS, PROMPT_BLOCKS = 44, 84, 20
IDS = {"ignore_eos": True, "return_token_ids": True}

AWAY = ("--session-hold-ms", "0", "--session-window-ms", "1")
"""No window of 1 ms is probable enough: a session that this node answers is parked at once, and comes up when its next
request reads it."""

NODES = {
    "prefill-0": AWAY,
    "decode-0": ("--no-session-parking",),
    "store-0": (*AWAY, "--session-ttl-ms", "1000", "--dram-bytes", str(DRAM_BLOCKS * BLOCK_BYTES)),
}
"""Each node parks the sessions that it accepts as its own flags say."""

FLAGS = ("--kv-cache-bytes", str(ARENA_BLOCKS * BLOCK_BYTES), "--max-model-len", "480", "--prefix-fetch", "always")


def tiers(url: str, prompt: list[int], **body: Any) -> tuple[list[int], dict[str, int]]:
    """The tokens of the answer, and the blocks of its prefix by the tier of the pool from which they came."""
    answer = complete(url, prompt, 8, **IDS, **body)
    found: dict[str, int] = {}
    for event in timeline(url, answer["id"])["events"]:
        for tier, count in event["detail"].get("tiers", {}).items() if event["event"] == "prefix_fetched" else ():
            found[tier] = found.get(tier, 0) + count
    return answer["choices"][0]["token_ids"], found


def session_blocks(cluster: LocalCluster) -> dict[str, int]:
    return rest.get(f"{cluster['store-0'].url}/debug/state")["session_blocks"]


def test_kv_of_a_session_is_parked_between_its_turns(start: Start, tiny_model, tmp_path):
    rng = random.Random(SEED)
    print(f"seed {SEED}")

    def some() -> list[int]:
        """A prompt of whole blocks, and a token that is computed in any case."""
        return [rng.randrange(1000, 40_000) for _ in range(PROMPT_BLOCKS * BLOCK + 1)]

    own = NODES | {"store-0": (*NODES["store-0"], "--ssd-path", str(tmp_path), "--ssd-bytes", "4M")}
    with start("prefill=1,decode=1,store=1", *tiny_model, *FLAGS, role_flags=own) as cluster:
        prefill, decode, store = (cluster[name].url for name in ("prefill-0", "decode-0", "store-0"))

        def ended(url: str, prompt: list[int], **body: Any) -> list[int]:
            tokens, _ = tiers(url, prompt, **body)
            settled(cluster)
            return tokens

        older, talk = some(), some()
        ended(prefill, older)
        ended(decode, some(), session_id="not parked")
        first = ended(prefill, talk, session_id="talk")
        wait_until(lambda: session_blocks(cluster)["aside"] >= PROMPT_BLOCKS, "the home hears of the turn")
        assert session_blocks(cluster)["parked"] <= PROMPT_BLOCKS + 1, "only the session of the node that parks"
        for _ in range(2):
            ended(prefill, some())  # the DRAM is full now, and the arenas have forgotten both prompts

        _, found = tiers(prefill, older)
        assert found == {"dram": PROMPT_BLOCKS}, "it was used before the session, and is no session"
        second, found = tiers(prefill, talk, session_id="talk")
        assert sum(found.values()) == PROMPT_BLOCKS and found["ssd"] > 0, "what is parked leaves DRAM first"
        assert second == first

        gone = some()
        kept = ended(store, gone, session_id="gone")

        def ended_for_good() -> bool:
            found = session_blocks(cluster)
            return found["over"] + found["dropped"] >= PROMPT_BLOCKS

        wait_until(ended_for_good, "its time to live is over")

        def fill() -> bool:
            """One more prompt; whether the tier, nearly full, has dropped the session whose time to live is over."""
            ended(prefill, some())
            return session_blocks(cluster)["dropped"] >= PROMPT_BLOCKS

        assert any(fill() for _ in range(40)), "a session that does not return makes room"
        for _ in range(3):
            ended(prefill, some())  # the arenas forget it too
        again, found = tiers(prefill, gone)
        assert found == {} and again == kept, "no tier has it"
