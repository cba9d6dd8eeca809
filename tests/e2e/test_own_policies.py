"""Nodes with the six policies of docs/hacking.md from one file of a user; tests/lab/test_hacking.py runs the same file
in the simulator.

Nothing here asks how long something takes. The tests go on where the one before ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, settled, wait_until
from tests.e2e.policy_flags import ARENA_BLOCKS, BLOCK, BLOCK_BYTES, EVERY_ALONE, LEAST_PROMPT_ROW, argv
from tests.e2e.test_policy_flags import PROMPT, cached, endless, engine, first_token, ids, lines
from tests.lab.own_policies import DECIDES, all_six

DRAM_BLOCKS = 30


class Own(NamedTuple):
    cluster: LocalCluster
    called: Path
    steps: Path

    @property
    def url(self) -> str:
        """Of the node that accepts requests, and computes nothing."""
        return self.cluster["store-0"].url


@pytest.fixture(scope="module")
def own(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    policies, called = all_six(folder)
    steps = folder / "steps"
    flags = [*policies, *argv(EVERY_ALONE | {"dram_bytes": str(DRAM_BLOCKS * BLOCK_BYTES)})]
    model = tiny_model(tmp_path_factory.mktemp("model"))
    recorded = {"mixed-0": ["--record-steps", str(steps)]}
    with start("mixed=1,store=1", *model, *flags, role_flags=recorded) as cluster:
        yield Own(cluster, called, steps)


def test_one_request_passes_through_all_six(own):
    """Once arena and pool are full."""
    prompts = [ids(number, PROMPT + 1) for number in range(ARENA_BLOCKS * BLOCK // PROMPT)]
    for prompt in prompts:
        assert cached(own.url, prompt) == 0
    settled(own.cluster)
    own.called.write_text("")
    answer = complete(own.url, ids(20, PROMPT + 1), 8, ignore_eos=True, service_class="interactive")
    assert answer["usage"]["completion_tokens"] == 8
    settled(own.cluster)
    assert set(own.called.read_text().split()) == DECIDES.keys()
    assert cached(own.url, prompts[0]) == PROMPT, "the least recently used one"
    assert cached(own.url, prompts[-1]) < PROMPT, "the newest one made room"
    shares = [state["store"]["dram"] for state in settled(own.cluster).values()]
    assert sum(share["refused"] for share in shares) > 0, "blocks behind the head of a prompt"


def test_a_prompt_gets_half_of_a_step(own):
    settled(own.cluster)
    before = len(lines(own.steps))
    complete(own.url, ids(41, 2000), 1, service_class="standard")
    settled(own.cluster)
    rows = [tokens for step in lines(own.steps)[before:] for tokens, _ in step["rows"] if tokens >= LEAST_PROMPT_ROW]
    half = int(EVERY_ALONE["max_num_batched_tokens"]) // 2 // BLOCK * BLOCK
    assert rows == [half, 2000 - half]


def test_batch_is_refused_and_the_longest_prompt_is_first(own):
    with pytest.raises(rest.RestError, match=r"answers 429: .*not today"):
        complete(own.url, ids(50, 100), 1, service_class="batch")
    node = own.cluster["mixed-0"]
    asked = {}
    with ThreadPoolExecutor(4) as pool, endless(node, 51):
        with endless(node, 52):
            for number, count in enumerate((200, 600, 400)):
                asked[count] = pool.submit(complete, node.url, ids(53 + number, count), 1, service_class="standard")
                wait_until(lambda: engine(node)["waiting"] == len(asked), str(count))
        begun = {count: first_token(node.url, answer.result()["id"]) for count, answer in asked.items()}
    assert sorted(begun, key=begun.__getitem__) == [600, 400, 200]
    settled(own.cluster)
