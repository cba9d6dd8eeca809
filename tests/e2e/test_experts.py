"""Nodes whose experts are on several ranks: the tokens of one process, and answers after the loss of a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch

from attention.choice.choose import choose
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.step.runner import Runner
from lab.faults.tiny import EXPERTS, tiny_model
from lab.foreign.common.processes import free_port
from lab.launch.rest import RestError
from tests.e2e.conftest import SMALL, Start, complete, settled
from tests.e2e.test_start import run
from tests.e2e.test_tensor_parallel import children, running, soon
from tests.engine.model.test_model import greedy
from tests.engine.tiny_families import empty_pool

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [list(range(100, 100 + n)) for n in (5, 150, 331)]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> list[str]:
    return [*tiny_model(tmp_path_factory.mktemp("moe"), **EXPERTS), "--max-model-len", "2048", *SMALL]


@pytest.fixture(scope="module")
def expected(moe, embedded_tokenizer) -> list[str]:
    """What one process with all experts computes, without a node around it."""
    source = describe(moe[1], "dummy")
    model = Model(source.config, weights.load(source, torch.float32), choose("torch", "cpu"))
    texts = []
    for prompt in PROMPTS:
        runner = Runner(model, empty_pool(source, torch.float32), 16)
        ids = greedy(runner, prompt, NEW_TOKENS, [len(prompt)], list(range(len(prompt) // 16 + 2)))
        texts.append(embedded_tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def answers(url: str) -> list[dict]:
    return [complete(url, prompt, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]


def texts(url: str) -> list[str]:
    return [one["choices"][0]["text"] for one in answers(url)]


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def test_ranks_prefill_and_one_process_decodes(start: Start, moe, expected):
    """Then the node is killed, and its ranks end with it."""
    flags = ["--expert-parallel-size", "3", "--num-redundant-experts", "3"]
    with start("prefill=1,decode=1", *moe, role_flags={"prefill": flags}) as cluster:
        assert texts(cluster["decode-0"].url) == expected
        assert texts(cluster["prefill-0"].url) == expected  # prefixes are found now
        settled(cluster)
        ranks = children(cluster["prefill-0"].pid)
        assert len(ranks) == 2
        cluster.kill("prefill-0")
        soon(lambda: not any(map(running, ranks)))


def test_an_answer_tells_that_experts_were_missing(start: Start, moe, expected):
    """With --expert-loss drop, without copies: usage says so, nothing of it is reused, and the rank comes back."""
    with start("mixed=1", *moe, "--expert-parallel-size", "2", "--expert-loss", "drop") as cluster:
        url = cluster.nodes[0].url
        assert texts(url) == expected
        assert get(f"{url}/health") == {"status": "ok"}
        (rank,) = children(cluster.nodes[0].pid)
        os.kill(rank, signal.SIGKILL)
        answer = complete(url, list(range(7, 250)), NEW_TOKENS, ignore_eos=True)
        assert answer["usage"]["dropped_experts"] > 0
        soon(lambda: get(f"{url}/health") == {"status": "ok"}, 60)
        again = complete(url, list(range(7, 250)), NEW_TOKENS, ignore_eos=True)
        assert "dropped_experts" not in again["usage"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert texts(url) == expected
        settled(cluster)
        state = get(f"{url}/debug/state")["engine"]["experts"]
        assert state["times_masked"] == 1 and state["restarts"] == 1 and state["masked"] == {}
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        assert "mooncake:expert_rank_masked{" in metrics and "mooncake:expert_pairs_total{" in metrics


def test_a_node_waits_for_ranks_of_other_hosts(start: Start, moe, expected, tmp_path):
    """Two ranks that join over TCP, with the cluster's key; then one of them is lost and comes back."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    port = free_port()
    sealed = ["--cluster-key-file", str(key)]
    join = ["expert-rank", "--join", f"127.0.0.1:{port}", "--num-threads", "1"]
    command = [sys.executable, str(ROOT / "mooncake.py"), *join, *sealed]
    flags = ["--expert-parallel-size", "3", "--expert-replicas", "2", "--expert-remote-ranks", "2"]
    others = [subprocess.Popen(command) for _ in range(2)]
    try:
        with start("mixed=1", *moe, *flags, "--expert-port", str(port), *sealed) as cluster:
            url = cluster.nodes[0].url
            assert texts(url) == expected
            others[0].kill()
            others[0].wait()
            assert texts(url) == expected
            soon(lambda: len(get(f"{url}/health").get("masked_ranks", ())) == 1, 60)
            others.append(subprocess.Popen(command))
            soon(lambda: get(f"{url}/health") == {"status": "ok"}, 60)
            assert texts(url) == expected
            settled(cluster)
            experts = get(f"{url}/debug/state")["engine"]["experts"]
            assert experts["remote"]["connected"] == [1, 2] and experts["experts_from"]["ranks"] > 0
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_a_rank_joins_and_leaves_under_load(start: Start, moe):
    """A process on another host makes the group wider, and narrower when it ends; requests under way go on."""
    port, ids = free_port(), list(range(100, 231))
    flags = ["--expert-parallel-size", "2", "--max-expert-parallel-size", "3", "--expert-port", str(port)]
    command = [sys.executable, str(ROOT / "mooncake.py"), "expert-rank", "--join", f"127.0.0.1:{port}"]
    with start("mixed=1", *moe, *flags) as cluster:
        url = cluster.nodes[0].url

        def answer() -> str:
            return complete(url, ids, 60, ignore_eos=True)["choices"][0]["text"]

        def experts() -> dict:
            return get(f"{url}/debug/state")["engine"]["experts"]

        calm, found, stop = answer(), list[str](), threading.Event()
        assert experts()["width"] == 2 and get(f"{url}/health") == {"status": "ok"}

        def load() -> None:
            while not stop.is_set():
                found.append(answer())

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        process = subprocess.Popen([*command, "--num-threads", "1"])
        try:
            soon(lambda: experts()["width"] == 3, 60)
            here = len(found)
            soon(lambda: len(found) >= here + 4, 60)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            soon(lambda: experts()["width"] == 2)
            gone = len(found)
            soon(lambda: len(found) >= gone + 4, 60)
        finally:
            stop.set()
            process.kill()
            process.wait()
            for thread in threads:
                thread.join()
        assert set(found) == {calm}
        state = experts()
        assert state["pairs_by_rank"][2] > 0 and state["times_masked"] == 0 and state["masked"] == {}
        assert "mooncake:expert_ranks{" in urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
        settled(cluster)


def test_without_copies_a_request_fails_with_the_name_of_the_rank(start: Start, moe, expected):
    """--expert-loss fail, on the only node: 503 until the rank is back. It cannot come back while it is stopped."""
    with start("mixed=1", *moe, "--expert-parallel-size", "2", "--expert-loss", "fail") as cluster:
        url = cluster.nodes[0].url
        assert texts(url) == expected
        (rank,) = children(cluster.nodes[0].pid)
        os.kill(rank, signal.SIGSTOP)
        try:
            with pytest.raises(RestError, match="lost with rank 1 of --expert-parallel-size") as refused:
                complete(url, list(range(7, 250)), NEW_TOKENS, ignore_eos=True)
            assert refused.value.status == 503
            state = get(f"{url}/debug/state")["engine"]["experts"]
            assert list(state["masked"]) == ["1"] and state["dropped_pairs"] > 0
        finally:
            os.kill(rank, signal.SIGCONT)
        soon(lambda: get(f"{url}/health") == {"status": "ok"}, 60)
        assert texts(url) == expected
        settled(cluster)


def test_a_dense_model_is_refused(tiny_model):
    code, told = run(*tiny_model, "--port", "0", "--expert-parallel-size", "2")
    assert code == 2 and "--expert-parallel-size 2: the model has no experts" in told
