"""A node whose start was disturbed: its estimates are wrong, and become right while it has no requests.

The time of a step is that of an attention backend that mostly waits: a fixed time and a time per token in each layer,
which are long next to what other programs on the same cores add. So two nodes have the same speed on a busy machine
too. Most of it is the time of the tokens, which a group divides: the group saves nearly half, and the estimates of a
busy machine may miss by much before it seems to save less than --cpp-min-gain. A disturbed node waits ten times as long
while the file `disturbed` lies next to its backend.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import TINY, Start, complete, settled, timeline, wait_until

BACKEND = """
import time
from pathlib import Path

from attention.torch_backend import TorchBackend

DISTURBED = Path(__file__).with_name("disturbed")


class Waiting(TorchBackend):
    name = "waiting"

    def attend(self, q, *rest, **options):
        time.sleep((0.001 + 0.0003 * len(q)) * (10 if DISTURBED.exists() else 1))
        return super().attend(q, *rest, **options)
"""

LAYERS = 4
LONG = 1500
TRIES, PAUSE_S = 15, 5
FLAGS = (
    *("--prefill-parallel", "cpp", "--cpp-min-tokens", "400", "--cpp-min-gain", "0.1"),
    *("--max-num-batched-tokens", "128", "--calibration-ms", "1000", "--calibration-cache", "off"),
    *("--num-threads", "1", "--kv-cache-bytes", "64M"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, embedded_tokenizer: Any) -> list[str]:
    folder = tmp_path_factory.mktemp("deep")
    (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": LAYERS}))
    embedded_tokenizer.save(folder / "tokenizer.json")
    return ["--model", str(folder), "--load-format", "dummy", "--dtype", "float32", "--served-model-name", "deep"]


def backend(folder: Path) -> list[str]:
    folder.mkdir()
    (folder / "waiting.py").write_text(BACKEND)
    return ["--attention-backend", f"{folder / 'waiting.py'}:Waiting"]


def disturbed(cluster: LocalCluster, folder: Path) -> Node:
    """A new prefill node that is disturbed until it is ready."""
    flags, cause = backend(folder), folder / "disturbed"
    cause.touch()
    node = cluster.add("prefill", *flags, name="prefill-1")
    cause.unlink()
    return node


def checks(node: Node) -> dict[str, float]:
    return dict(rest.get(f"{node.url}/debug/state")["engine"]["idle_checks"])


def grouped(url: str, number: int) -> bool:
    """Whether a group computes a new long prompt."""
    answer = complete(url, [5 + number * 7 + i * 13 % 40000 for i in range(LONG)], 2)
    return any(event["event"] == "stage" for event in timeline(url, answer["id"])["events"])


def test_a_disturbed_start_is_corrected_and_then_a_group_forms(start: Start, model: list[str], tmp_path: Path):
    steady = backend(tmp_path / "steady")
    with start("prefill=1,decode=1", *model, *FLAGS, *steady) as cluster:
        url = cluster["decode-0"].url
        late = disturbed(cluster, tmp_path / "late")
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
