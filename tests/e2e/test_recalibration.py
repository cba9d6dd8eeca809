"""A node whose start was disturbed: its estimates are wrong, and become right while it has no requests."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import TINY, Start, complete, settled, timeline, wait_until

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Its steps take longer than the pieces of time that a disturbed node gets."""

RUNS_S, STANDS_S = 0.002, 0.02
"""How a node that starts is disturbed: it runs and stands still by turns, about ten times as long."""

LONG = 1500
TRIES, PAUSE_S = 15, 5
FLAGS = (
    *(
        "--prefill-parallel",
        "cpp",
        "--cpp-min-tokens",
        "400",
        "--cpp-min-gain",
        "0.2",
        "--max-num-batched-tokens",
        "128",
    ),
    *("--calibration-ms", "1000", "--calibration-cache", "off", "--num-threads", "1", "--kv-cache-bytes", "64M"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, embedded_tokenizer: Any) -> list[str]:
    folder = tmp_path_factory.mktemp("deep")
    (folder / "config.json").write_text(json.dumps(TINY | MODEL))
    embedded_tokenizer.save(folder / "tokenizer.json")
    return ["--model", str(folder), "--load-format", "dummy", "--dtype", "float32", "--served-model-name", "deep"]


def disturbed(cluster: LocalCluster, name: str) -> Node:
    """Start a prefill node that hardly runs from the moment at which its model is loaded until it is ready."""
    with ThreadPoolExecutor(1) as launcher:
        ready = launcher.submit(cluster.add, "prefill", name=name)
        while not ready.done() and not (name in cluster._nodes and "attention by" in cluster[name].log.read_text()):
            time.sleep(RUNS_S)
        while not ready.done():
            os.kill(cluster[name].pid, signal.SIGSTOP)
            time.sleep(STANDS_S)
            os.kill(cluster[name].pid, signal.SIGCONT)
            time.sleep(RUNS_S)
        return ready.result()


def checks(node: Node) -> dict[str, float]:
    return dict(rest.get(f"{node.url}/debug/state")["engine"]["idle_checks"])


def grouped(url: str, number: int) -> bool:
    """Whether a group computes a new long prompt."""
    answer = complete(url, [5 + number * 7 + i * 13 % 40000 for i in range(LONG)], 2)
    return any(event["event"] == "stage" for event in timeline(url, answer["id"])["events"])


def test_a_disturbed_start_is_corrected_and_then_a_group_forms(start: Start, model: list[str]):
    with start("prefill=1,decode=1", *model, *FLAGS) as cluster:
        url = cluster["decode-0"].url
        late = disturbed(cluster, "prefill-1")
        alone = not grouped(url, 0)
        assert alone or checks(late)["wrong"], "a group with a node that seems ten times slower saves too little"
        wait_until(lambda: checks(late)["wrong"] > 0, "its estimates are corrected", 120)
        for number in range(1, TRIES + 1):
            if grouped(url, number):
                break
            time.sleep(PAUSE_S)  # on a busy machine a check may be disturbed too, and the next one is right
        else:
            raise AssertionError("two nodes of the same speed form no group")
        settled(cluster)
        assert checks(late)["spent_s"] > 0
