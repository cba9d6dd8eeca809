"""Prefill, decode and store nodes whose blocks differ: the tokens of one process that takes the same conversions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from attention.choice.choose import choose
from attention.codes import pool_in
from cache.block import BlockGeometry
from engine.checkpoint import weights
from engine.checkpoint.model_source import describe
from engine.model.decoder import Model
from engine.sampling.logit_rules import SamplingRow
from engine.step.inputs import Row
from engine.step.request import SamplingParams
from engine.step.runner import Runner
from engine.unlike.rows import copy_rows
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import TINY, Start, complete, settled, timeline, wait_until

PROMPT, COUNT = list(range(3000, 3330)), 20
KNOWN = 320
"""Tokens of PROMPT that every pool has: whole blocks of 16 and of 64."""

SHAPE = TINY["num_hidden_layers"], TINY["num_key_value_heads"], 16

NODES = "prefill=1,decode=1,store=1"
FLAGS = ("--prefix-fetch", "always", "--store-timeout-ms", "10000")


class Arena:
    """A model with an arena of its own, as one node has it."""

    def __init__(self, folder: str, kv_dtype: str, dtype: torch.dtype = torch.float32, count: int = COUNT) -> None:
        """count: tokens of the answer."""
        source, geometry = describe(folder, "dummy"), BlockGeometry(*SHAPE, 16, kv_dtype)
        self.blocks = list(range(-(-(len(PROMPT) + count) // 16)))
        memory = torch.zeros(len(self.blocks) * geometry.block_bytes, dtype=torch.uint8)
        self.kv = pool_in(memory, geometry.shape, kv_dtype)
        model = Model(source.config, weights.load(source, dtype), choose("auto", "cpu", 16, kv_dtype))
        self._runner = Runner(model, self.kv, 16)

    def step(self, known: list[int], done: int) -> int:
        """Compute the tokens behind `done`; returns the next one."""
        sample = SamplingRow(SamplingParams(temperature=0), known, len(PROMPT))
        (sampled,) = self._runner.step([Row(known[done:], done, self.blocks, sample)])
        return sampled[0].token_id

    def send(self, other: Arena, tokens: int) -> None:
        for block in range(-(-tokens // 16)):
            copy_rows(self.kv[block], 0, other.kv[block], 0, min(16, tokens - 16 * block))


def decoded(prefill: Arena, decode: Arena, known: int = 0, count: int = COUNT) -> list[int]:
    """One computes the prompt behind its first `known` tokens, the other the answer."""
    tokens = [*PROMPT, prefill.step(PROMPT, known)]
    prefill.send(decode, len(PROMPT))
    while len(tokens) < len(PROMPT) + count:
        tokens.append(decode.step(tokens, len(tokens) - 1))
    return tokens[len(PROMPT) :]


@dataclass(frozen=True)
class Pair:
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    cluster: tuple[str, ...]
    types: tuple[str, str, str] = ("float32", "float32", "float32")  # of KV: prefill, decode, pool
    way: tuple[str, ...] = ()  # of the prefill node
    exact: bool = False  # the tokens are those of nodes that do not differ
    dtypes: tuple[torch.dtype, torch.dtype] = field(default=(torch.float32, torch.float32))  # of the models


INT8, FLOAT = ("--kv-cache-dtype", "int8"), ("--kv-cache-dtype", "float32")
WIDE, NARROW = ("--block-size", "64"), ("--block-size", "16")
POOL8, POOL32 = ("--cluster-kv-dtype", "int8"), ("--cluster-kv-dtype", "float32")
POOL16 = ("--cluster-block-size", "16")
BF16 = ("--kv-cache-dtype", "bfloat16")
RANKS = ("--tensor-parallel-size", "2")
TCP = ("--transport", "tcp")

PAIRS = {
    "float32 -> int8": Pair(FLOAT, INT8, POOL8, ("float32", "int8", "int8")),
    "int8 -> float32": Pair(INT8, FLOAT, POOL8, ("int8", "float32", "int8"), ("--kv-transfer", "pull")),
    "bfloat16 -> int8": Pair(BF16, INT8, POOL8, ("bfloat16", "int8", "int8"), ("--kv-overlap", "chunk", *TCP)),
    "bfloat16 -> float32": Pair(BF16, FLOAT, ("--cluster-kv-dtype", "bfloat16"), ("bfloat16", "float32", "bfloat16")),
    "16 -> 64": Pair(NARROW, WIDE, POOL16, way=TCP, exact=True),
    "64 -> 16": Pair(WIDE, NARROW, POOL16, way=("--kv-transfer", "pull"), exact=True),
    "int8/64 -> float32/16": Pair((*INT8, *WIDE), FLOAT, (*POOL8, *POOL16), ("int8", "float32", "int8")),
    "1 -> 2 ranks": Pair((), RANKS, (), exact=True),
    "2 -> 1 rank": Pair(RANKS, (), (), exact=True),
    "2 ranks, 16 -> 64": Pair(RANKS, WIDE, POOL16, exact=True),
    "avx2 -> no kernels of the CPU": Pair(
        ("--attention-backend", "cpu", "--cpu-level", "avx2"), ("--attention-backend", "torch"), (), exact=True
    ),
    "models in float32 -> bfloat16": Pair(
        ("--dtype", "float32"),
        ("--dtype", "bfloat16"),
        ("--cluster-kv-dtype", "float32"),
        ("float32", "bfloat16", "float32"),
        dtypes=(torch.float32, torch.bfloat16),
    ),
}


HEAVY = ("float32 -> int8", "bfloat16 -> float32", "16 -> 64", "2 ranks, 16 -> 64")
"""The others have the same conversions, in another direction or together."""


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=name, marks=[pytest.mark.heavy] if name in HEAVY else []) for name, pair in PAIRS.items()],
)
def test_the_tokens_of_one_process(start: Start, tiny_model, embedded_tokenizer, pair: Pair):
    """First the prompt is computed, then most of it is in the pool."""
    folder = tiny_model[1]
    mine, theirs, pooled = pair.types
    prefill, decode = Arena(folder, mine, pair.dtypes[0]), Arena(folder, theirs, pair.dtypes[1])
    first = decoded(prefill, decode)
    through = Arena(folder, pooled)
    prefill.send(through, KNOWN)
    again = Arena(folder, mine, pair.dtypes[0])
    through.send(again, KNOWN)
    second = decoded(again, Arena(folder, theirs, pair.dtypes[1]), KNOWN)
    if pair.exact:
        plain = decoded(Arena(folder, "float32"), Arena(folder, "float32"))
        assert first == second == plain
    wanted, later = (embedded_tokenizer.decode(one, skip_special_tokens=True) for one in (first, second))
    roles = {"prefill": [*pair.prefill, *pair.way], "decode": [*pair.decode]}
    with start(NODES, *tiny_model, *FLAGS, *pair.cluster, role_flags=roles) as cluster:
        url = cluster["prefill-0"].url
        answer = complete(url, PROMPT, COUNT, ignore_eos=True)
        assert answer["choices"][0]["text"] == wanted
        check_moved(url, answer["id"], pair)
        settled(cluster)
        assert rest.get(f"{cluster['store-0'].url}/debug/state")["store"]["dram"]["blocks"] >= KNOWN // 16
        cluster.restart("decode-0", *pair.decode)
        url = cluster.restart("prefill-0", *pair.prefill, *pair.way).url
        answer = complete(url, PROMPT, COUNT, ignore_eos=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == KNOWN
        assert answer["choices"][0]["text"] == later
        settled(cluster)


def check_moved(url: str, request_id: str, pair: Pair) -> None:
    """KV moved in the form of the decode node."""
    (moved,) = [e["detail"] for e in timeline(url, request_id)["events"] if e["event"] == "kv_moved"]
    size = 64 if WIDE[1] in pair.decode else 16
    differ = pair.types[0] != pair.types[1] or (WIDE[1] in pair.prefill) != (WIDE[1] in pair.decode)
    assert moved.get("form") == (f"{pair.types[1]}/{size}" if differ else None)
    sent = BlockGeometry(*SHAPE, 1, pair.types[1])
    assert moved["bytes"] >= len(PROMPT) * sent.block_bytes
    assert moved["bytes"] <= 2 * (len(PROMPT) + 64) * sent.block_bytes
    assert ("conversion_seconds" in moved) == differ
    assert (moved.get("conversion_seconds", 0) > 0) == (pair.types[0] != pair.types[1])


def test_a_less_precise_node_reads_the_pool_and_puts_nothing_into_it(start: Start, tiny_model, embedded_tokenizer):
    folder, flags = tiny_model[1], [*POOL32]
    exact = Arena(folder, "float32")
    exact.step(PROMPT, 0)
    coarse = Arena(folder, "int8")
    exact.send(coarse, KNOWN)
    wanted = embedded_tokenizer.decode(decoded(coarse, Arena(folder, "float32"), KNOWN), skip_special_tokens=True)
    with start(NODES, *tiny_model, *FLAGS, *flags, role_flags={"decode": [*FLOAT]}) as cluster:
        complete(cluster["prefill-0"].url, PROMPT, 1)
        settled(cluster)
        cluster.restart("decode-0", *FLOAT)
        url = cluster.restart("prefill-0", *INT8).url
        answer = complete(url, PROMPT, COUNT, ignore_eos=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == KNOWN
        assert answer["choices"][0]["text"] == wanted
        settled(cluster)
        held = rest.get(f"{cluster['store-0'].url}/debug/state")["store"]["dram"]["blocks"]
        complete(url, [token + 1 for token in PROMPT], 1)
        settled(cluster)
        assert rest.get(f"{cluster['store-0'].url}/debug/state")["store"]["dram"]["blocks"] == held


def test_a_node_whose_blocks_differ_is_in_no_prefill_group(start: Start, tiny_model, embedded_tokenizer):
    """Though groups always seem worth it: of three prefill nodes, the two that are like the cluster form one."""
    plain = decoded(Arena(tiny_model[1], "float32"), Arena(tiny_model[1], "float32"))
    wanted = embedded_tokenizer.decode(plain, skip_special_tokens=True)
    groups = ("--prefill-parallel", "cpp", "--cpp-min-tokens", "100", "--cpp-min-gain", "-100")
    with start("prefill=1,decode=1", *tiny_model, *groups, *POOL16, role_flags={"decode": [*NARROW]}) as cluster:
        url = cluster["decode-0"].url

        def stages(prompt: list[int]) -> tuple[str, set[str]]:
            """The answer, and the nodes of the group that computed the prompt."""
            body = complete(url, prompt, COUNT, ignore_eos=True)
            settled(cluster)  # a node may tell of its stage after the answer
            events = timeline(url, body["id"])["events"]
            return body["choices"][0]["text"], {event["node"] for event in events if event["event"] == "stage"}

        other = cluster.add("prefill", *WIDE, name="prefill-wide")
        assert "the blocks of this node differ from the cluster's" in other.log.read_text()
        assert stages(PROMPT) == (wanted, set())
        cluster.add("prefill", name="prefill-like")
        cluster_of = {"prefill-0", "prefill-like"}
        found = [stages([token + shift for token in PROMPT])[1] for shift in range(1, 6)]
        assert all(nodes in (set(), cluster_of) for nodes in found) and cluster_of in found
        settled(cluster)


def test_a_killed_decode_node_with_larger_blocks_costs_no_token(start: Start, tiny_model, embedded_tokenizer):
    """Two decode nodes of 64 tokens a block, one of which is killed in the middle of an answer."""
    folder, count = tiny_model[1], 600
    wanted = decoded(*(Arena(folder, "float32", count=count) for _ in range(2)), count=count)
    nodes, roles = "prefill=1,decode=2,store=1", {"decode": [*WIDE]}
    with start(nodes, *tiny_model, *FLAGS, *POOL16, role_flags=roles) as cluster, ThreadPoolExecutor(1) as client:
        url = cluster["prefill-0"].url
        asked = client.submit(complete, url, PROMPT, count, ignore_eos=True)
        wait_until(lambda: decoding(cluster) is not None, "a request decodes")
        killed = decoding(cluster)
        assert killed is not None, "the answer ended before anyone was killed"
        cluster.kill(killed)
        answer = asked.result(timeout=120)
        assert answer["choices"][0]["text"] == embedded_tokenizer.decode(wanted, skip_special_tokens=True)
        events = [event["event"] for event in timeline(url, answer["id"])["events"]]
        assert "attempt_failed" in events and events.count("kv_moved") >= 2
        settled(cluster)


def decoding(cluster: LocalCluster) -> str | None:
    """The decode node on which a request runs."""
    for name in ("decode-0", "decode-1"):
        if cluster[name].alive and rest.get(f"{cluster[name].url}/debug/state")["engine"]["running"]:
            return name
    return None
