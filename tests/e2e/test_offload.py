"""Weights beyond memory (--offload auto): the tokens of nodes that keep all weights, with less memory."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.cpu.level import levels_here
from engine.checkpoint.model_source import describe
from engine.checkpoint.quantized_weights import reading_of
from engine.config.config import EMBEDDED_MODEL
from engine.loading.offload_model import sizes_of
from lab.launch import rest
from lab.launch.cluster import DEFAULT_NODES, LocalCluster
from lab.launch.nodes import Node
from sched.offload import Sizes
from tests.e2e.conftest import Start, complete, settled, wait_until
from tests.e2e.test_start import run

pytestmark = pytest.mark.skipif(not levels_here(), reason="the kernels need x86 with AVX2, or aarch64")

ONE = ("--num-threads", "1", "--attention-backend", "cpu")
PROMPTS = [[5 + number + i * 13 % 40000 for i in range(tokens)] for number, tokens in enumerate((9, 700, 40, 300))]


def offload(sizes: Sizes, layers: float, folder: Path) -> tuple[str, ...]:
    """Flags with memory for so many layers."""
    memory = str(sizes.fixed + int(layers * max(sizes.layers)))
    return ("--offload", "auto", "--weight-memory-bytes", memory, "--offload-path", str(folder))


def ask(url: str, prompt: list[int], tokens: int) -> str:
    return str(complete(url, prompt, tokens, ignore_eos=True)["choices"][0]["text"])


def answers(cluster: LocalCluster) -> list[str]:
    """All prompts at once, then each alone."""
    url = cluster.nodes[0].url
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        together = list(clients.map(lambda prompt: ask(url, prompt, 24), PROMPTS))
    return [*together, *(ask(url, prompt, 24) for prompt in PROMPTS)]


def state(node: Node) -> dict[str, Any]:
    return dict(rest.get(f"{node.url}/debug/state")["engine"]["offload"])


def private_bytes(node: Node) -> int:
    """Memory of the process that is not a file's: arenas are memfds and count apart."""
    for line in Path(f"/proc/{node.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


@pytest.fixture
def tiny_sizes(tiny_model: list[str]) -> Sizes:
    folder = tiny_model[tiny_model.index("--model") + 1]
    return sizes_of(describe(folder, load_format="dummy").config, {}, 4)


def test_the_default_shape(start: Start, tiny_model, tiny_sizes, tmp_path):
    """A prefill and a decode node read all layers in each pass; the KV moves as always."""
    with start(DEFAULT_NODES, *tiny_model, *ONE) as cluster:
        right = answers(cluster)
        settled(cluster)
        assert rest.get(f"{cluster['decode-0'].url}/debug/state")["engine"]["offload"] is None
    flags = offload(tiny_sizes, 2.4, tmp_path)
    roles = {"prefill": flags, "decode": flags}
    with start(DEFAULT_NODES, *tiny_model, *ONE, role_flags=roles) as cluster:
        assert answers(cluster) == right
        settled(cluster)
        for name in ("prefill-0", "decode-0"):
            found = state(cluster[name])
            assert found["streamed_layers"] == found["layers"] == 3 and found["passes"] > 0
            assert found["bytes_read"] >= (found["passes"] - 1) * found["pass_bytes"]
        assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_node_that_dies_is_a_pause_and_leaves_no_file(start: Start, tiny_model, tiny_sizes, tmp_path):
    flags = offload(tiny_sizes, 2.4, tmp_path)
    with start("mixed=2,store=1", *tiny_model, *ONE, role_flags={"mixed": flags}) as cluster:
        url = cluster["store-0"].url
        expected = complete(url, PROMPTS[1], 200, ignore_eos=True)["choices"][0]["text"]
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(complete, url, PROMPTS[1], 200, ignore_eos=True)
            victim = busy(cluster, answer)
            if victim is not None:
                cluster.kill(victim.name, signal.SIGKILL)
            assert answer.result()["choices"][0]["text"] == expected
        settled(cluster)
    assert not list(tmp_path.iterdir())


def busy(cluster: LocalCluster, answer: Any) -> Node | None:
    """The node that computes; None if the answer came first."""
    while not answer.done():
        for node in cluster.nodes:
            if node.name.startswith("mixed") and rest.get(f"{node.url}/debug/state")["engine"]["running"]:
                return node
    return None


def test_the_embedded_model_with_a_third_of_its_layers(start: Start, tmp_path):
    """In 8 bits, which our kernels multiply on both nodes: equal tokens, less memory by the layers that are read,
    metrics, and what the node says. Attention by our kernels, too: otherwise each node measures at its start which
    backend is faster, and rows that are rounded to bytes may then decide for another token."""
    source = describe(EMBEDDED_MODEL)
    reading = reading_of(source, "int8", torch.float32)
    with reading.opened:
        sizes = sizes_of(source.config, reading.kinds, 4)
    flags = ("--dtype", "float32", "--weight-dtype", "int8", "--kv-cache-bytes", "100M", "--max-model-len", "1024")
    flags = (*flags, "--attention-backend", "cpu")
    used: list[int] = []
    found: list[list[str]] = []
    for more in ((), offload(sizes, len(sizes.layers) / 3, tmp_path)):
        with start("mixed=1", *flags, *more) as cluster:
            node = cluster.nodes[0]
            found.append([ask(node.url, prompt[:60], 12) for prompt in PROMPTS])
            settled(cluster)
            used.append(private_bytes(node))
            if more:
                told = state(node)
                text = rest.text(f"{node.url}/metrics")
                log = "\n".join(node.last_lines(200))
                with pytest.raises(rest.RestError, match="not with --offload auto"):
                    rest.post(f"{node.url}/v1/update_weights", {"prefix": "x/", "version": "1"})
    assert found[0] == found[1]
    assert 15 < told["streamed_layers"] < 25
    assert told["memory_bytes"] <= sizes.fixed + len(sizes.layers) / 3 * max(sizes.layers)
    assert used[0] - used[1] > 0.6 * (told["weight_bytes"] - told["memory_bytes"]), (used, told)
    assert "mooncake:offload_layers{" in text and f" {told['streamed_layers']}.0" in text
    assert "are read in each pass" in log and "Forecast without attention" in log


def test_estimates_are_at_least_the_time_of_reading(start: Start, tiny_model, tiny_sizes, tmp_path):
    flags = offload(tiny_sizes, 2.4, tmp_path)
    with start("mixed=1", *tiny_model, *ONE, *flags) as cluster:
        node = cluster.nodes[0]
        answers(cluster)
        wait_until(lambda: state(node)["passes"] > 24, "no passes")
        told = rest.get(f"{node.url}/debug/state")["engine"]
        offloaded, (first, *_) = told["offload"], told["mixed_step"]["coefficients"]
        assert first > 0.2 * offloaded["pass_bytes"] / offloaded["read_bytes_per_s"]


def test_what_is_refused_at_start(tiny_model, tiny_sizes, tmp_path):
    given = (*tiny_model, *ONE, "--port", "0")
    code, told = run(*given, *offload(tiny_sizes, 1.5, tmp_path))
    assert code == 2 and "layers of" in told.splitlines()[-1] and "or more" in told.splitlines()[-1]
    code, told = run(*given, *offload(tiny_sizes, 2.4, Path("/dev/shm/mooncake-layers")))
    assert code == 2 and "--offload-path /dev/shm/mooncake-layers" in told.splitlines()[-1]
