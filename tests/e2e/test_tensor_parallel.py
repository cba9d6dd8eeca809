"""Nodes of two ranks: the tokens of one, blocks that other nodes can use, and an end without leftovers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.model_source import ModelSource, describe
from engine.model.decoder import Model
from engine.step.runner import Runner
from lab.launch import rest
from tests.e2e.conftest import Start, complete, settled
from tests.e2e.test_start import run
from tests.engine.model.test_model import greedy
from tests.engine.tiny_families import empty_pool

TWO_RANKS = ["--tensor-parallel-size", "2"]
PROMPTS = [list(range(100, 100 + n)) for n in (5, 150, 331)]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def expected(tiny_model, embedded_tokenizer) -> list[str]:
    """What one process computes, without a node around it."""
    source: ModelSource = describe(tiny_model[1], "dummy")
    model = Model(source.config, weights.load(source, torch.float32), choose("torch", "cpu"))
    texts = []
    for prompt in PROMPTS:
        runner = Runner(model, empty_pool(source, torch.float32), 16)
        ids = greedy(runner, prompt, NEW_TOKENS, [len(prompt)], list(range(len(prompt) // 16 + 2)))
        texts.append(embedded_tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def texts(url: str) -> list[str]:
    return [complete(url, prompt, NEW_TOKENS, ignore_eos=True)["choices"][0]["text"] for prompt in PROMPTS]


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def soon(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_blocks_of_two_ranks_are_whole(start: Start, tiny_model, expected):
    """Two ranks prefill, one process decodes from the blocks that were pushed to it. Then the node is killed."""
    with start("prefill=1,decode=1", *tiny_model, role_flags={"prefill": TWO_RANKS}) as cluster:
        assert texts(cluster["decode-0"].url) == expected
        assert texts(cluster["prefill-0"].url) == expected  # prefixes are found now
        settled(cluster)
        nodes = rest.get(f"{cluster['decode-0'].url}/live")["nodes"]
        stages = {node["node_id"]: node["load"]["stages"] for node in nodes}
        assert stages == {"prefill-0": False, "decode-0": True}, "ranks compute all layers of a prompt"
        (rank,) = children(cluster["prefill-0"].pid)
        cluster.kill("prefill-0")
        soon(lambda: not running(rank))


@pytest.mark.expects_error("tensor-parallel rank 1 ended with exit code -9")
@pytest.mark.parametrize("collectives", ["gloo", "mooncake"])
def test_a_node_that_lost_a_rank_ends(start: Start, tiny_model, expected, collectives):
    with start("mixed=1", *tiny_model, *TWO_RANKS, "--collectives", collectives) as cluster:
        node = cluster.nodes[0]
        assert texts(node.url) == expected
        settled(cluster)
        (rank,) = children(node.pid)
        node.expected_dead = True
        os.kill(rank, signal.SIGKILL)
        soon(lambda: not node.alive)
        assert node.process.returncode == 1
        assert any("tensor-parallel rank 1 ended with exit code -9" in line for line in node.last_lines(60))


def test_a_model_that_cannot_be_split_is_refused(tiny_model):
    code, told = run(*tiny_model, "--port", "0", "--tensor-parallel-size", "3")
    assert code == 2 and "Traceback" not in told
    assert told.splitlines()[-1] == (
        "mooncake: --tensor-parallel-size 3: the model's 4 attention heads do not divide by 3"
    )
