"""Real clusters: node processes of this repository on free ports of 127.0.0.1, stopped when their test module ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.forked_nodes import forked_nodes

__all__ = ["forked_nodes"]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""A Llama that loads at once; its tokens mean nothing, but they are the same on every node."""

SMALL = ("--kv-cache-bytes", "64M", "--calibration-ms", "100")
"""Arenas of 87,000 tokens of the tiny model, and a short calibration. Without them each node clears 2 GiB of memory in
advance, and counts 175,000 blocks whenever it tells its state."""

SHARE = ("--dram-bytes", "256M")
"""Of nodes that keep a share of the pool, unless the test says how much: for the same reason."""

Start = Callable[..., AbstractContextManager[LocalCluster]]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """start("prefill=1,decode=1", "--flag", ...) -> a running LocalCluster as a context manager; its logs are printed
    when the test fails inside it."""

    @contextmanager
    def cluster(
        nodes: str, *flags: str, role_flags: Mapping[str, Sequence[str]] | None = None, **options: Any
    ) -> Iterator[LocalCluster]:
        run_dir = tmp_path_factory.mktemp("cluster")
        own = dict(role_flags or {})
        if not any("--dram-bytes" in some for some in (flags, *own.values())):
            own["store"] = [*SHARE, *own.get("store", ())]
        with LocalCluster(nodes, flags, run_dir=run_dir, role_flags=own, **options) as running:
            try:
                yield running
            except BaseException:
                for node in running.nodes:
                    print(f"--- {node.name}\n" + "\n".join(node.last_lines(40)))
                raise

    return cluster


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that make a node serve a tiny random model with the embedded model's tokenizer."""
    from engine.checkpoint.model_source import describe
    from engine.text.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    Tokenizer.load(describe("smollm2-135m-instruct")).save(folder / "tokenizer.json")
    return ["--model", str(folder), "--load-format", "dummy", "--dtype", "float32", *SMALL]


@pytest.fixture(scope="session")
def embedded_tokenizer() -> Any:
    from engine.checkpoint.model_source import describe
    from engine.text.tokenizer import Tokenizer

    return Tokenizer.load(describe("smollm2-135m-instruct"))


def complete(url: str, prompt: str | list[int] | list[list[int]], max_tokens: int = 16, **body: Any) -> dict[str, Any]:
    """One greedy completion; the answer's body with its request id under "id"."""
    body = {"model": model_of(url), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | body
    return rest.post(f"{url}/v1/completions", body, timeout_s=120)


def model_of(url: str) -> str:
    return rest.get(f"{url}/v1/models")["data"][0]["id"]


def timeline(url: str, request_id: str) -> dict[str, Any]:
    return rest.get(f"{url}/debug/requests/{request_id}")


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Poll until it holds; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def settled(cluster: LocalCluster, within_s: float = 20.0) -> dict[str, dict[str, Any]]:
    """State of every living node once nothing is held for requests or transfers any more; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while True:
        left = max(1.0, deadline - time.monotonic())
        living = [node for node in cluster.nodes if node.alive]
        states = {node.name: rest.get(f"{node.url}/debug/state", timeout_s=left) for node in living}
        busy = {name: _work(state) for name, state in states.items() if _work(state)}
        if not busy:
            return states
        assert time.monotonic() < deadline, f"still held: {busy}"
        time.sleep(0.1)


def _work(state: dict[str, Any]) -> dict[str, Any]:
    """What an idle node must not have."""
    engine = state["engine"]
    if engine is None:
        return {}
    assert engine["integrity"] is None
    held = {**engine["references"], **engine["held_for_requests"], "blocks": engine["blocks"]["held"]}
    held["publish_backlog"] = engine["publish_backlog"]
    return {name: count for name, count in held.items() if count}
