"""Nodes with every value of every policy flag, and the effect of each; the table is in policy_flags.py.

Six nodes that are alone, and one cluster of nine, five of which load no weights. Nothing here asks how long something
takes: orders, counts and sizes only. Tests of one node go on where the one before ended.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.pooled.prefetch import WINDOW_BLOCKS
from lab.faults.tiny import tiny_model
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from lab.launch.nodes import Node
from tests.e2e.conftest import Start, complete, model_of, settled, timeline, wait_until
from tests.e2e.policy_flags import (
    ALONE,
    BLOCK,
    DECODE,
    EVERY_ALONE,
    EVERY_TOGETHER,
    GROUPED,
    LEAST_PROMPT_ROW,
    NODES,
    OTHERS,
    PREFILLS,
    ROWS,
    SWITCHES,
    TOGETHER,
    argv,
    choices,
    switches,
    value,
)

ON_DISK = ("one", "two")
"""Nodes with an SSD tier."""
SSD_FILES = {"lmdb": {"data.mdb"}, "file": {"slots", "table"}}

PROMPT = 640
"""Tokens of ten whole blocks of a node that is alone."""

ENGINES = 4
"""Nodes of the cluster that compute."""


def test_every_value_has_a_row():
    found = choices()
    assert found.keys() == ROWS.keys() | OTHERS.keys() and not ROWS.keys() & OTHERS.keys()
    for field, rows in ROWS.items():
        assert rows.keys() == found[field], f"--{field}: give each value a row in tests/e2e/policy_flags.py"
        for text, row in rows.items():
            if row.elsewhere:
                assert not row.node, f"{field} {text}"
                assert_there(row.elsewhere, f"{field} {text}")
                continue
            assert value(row.node, field) == text, f"{row.node} does not run with {field} {text}"
            assert row.test or row.not_asserted, f"{field} {text}"
            assert not row.test or row.test in globals(), f"{field} {text}: there is no {row.test}"


def test_every_switch_has_a_test():
    assert SWITCHES.keys() == switches()
    for field, test in SWITCHES.items():
        assert_there(test, f"--{field}")


def assert_there(test: str, what: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(), f"{what}: there is no {test}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the files of --record-steps."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def alone(start: Start, model, steps, tmp_path_factory) -> Iterator[dict[str, LocalCluster]]:
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        clusters = []
        for name, flags in ALONE.items():
            files = ["--record-steps", str(steps / name)]
            files += (
                ["--ssd-path", str(tmp_path_factory.mktemp("ssd")), "--ssd-bytes", "64M"] if name in ON_DISK else []
            )
            draft = draft_flags(model) if flags.get("speculative_method") == "draft" else []
            clusters.append(start("mixed=1", *model, *argv(EVERY_ALONE | flags), *files, *draft))
        yield dict(zip(ALONE, pool.map(stack.enter_context, clusters), strict=True))


@pytest.fixture(scope="module")
def together(start: Start, model) -> Iterator[LocalCluster]:
    own = {name: argv(flags) for name, flags in TOGETHER.items()}
    own[DECODE] += draft_flags(model)
    with start(NODES, *model, *argv(EVERY_TOGETHER), role_flags=own | {"store": ["--dram-bytes", "1536K"]}) as cluster:
        yield cluster


def draft_flags(model: list[str]) -> list[str]:
    """The model itself as the draft model."""
    return ["--speculative-model", model[1], "--speculative-kv-bytes", "8M"]


def ids(name: int, count: int) -> list[int]:
    """A prompt that shares no block with one of another name."""
    return [1000 + name, *((name * 37 + i * 11) % 40000 + 3 for i in range(count - 1))]


def cached(url: str, prompt: list[int], service_class: str = "interactive") -> int:
    """Tokens of it that were there, by an answer of one token."""
    answer = complete(url, prompt, 1, service_class=service_class)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def endless(node: Node, name: int) -> Iterator[None]:
    """A stream that decodes until the block ends: then its client hangs up. It is sent again while it is refused: for
    some milliseconds the prompt of the stream before it counts as work, although it is computed."""
    body = {"model": model_of(node.url), "prompt": ids(name, 20), "max_tokens": 3000, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "service_class": "interactive"}
    with closing(http.client.HTTPConnection(node.url.removeprefix("http://"), timeout=60)) as connection:

        def accepted() -> bool:
            nonlocal response
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            refused = response.status == 429
            if refused:
                response.read()
            return not refused

        response: http.client.HTTPResponse
        wait_until(accepted, "accepted")
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: ")
        yield
        response.close()


def engine(node: Node) -> dict[str, Any]:
    state: dict[str, Any] = rest.get(f"{node.url}/debug/state")["engine"]
    return state


# --- nodes that are alone

KEPT = {
    "lru": {"often": 0, "late": PROMPT, "once": 0},
    "lfu": {"often": PROMPT, "late": PROMPT, "once": 0},
    "fifo": {"often": 0, "late": 0},
    "length-aware": {"often": PROMPT, "late": PROMPT, "once": 3 * BLOCK},
    "s3-fifo": {"often": PROMPT, "late": 0},
    "cost-aware": {"often": PROMPT},
}
"""Tokens found of three prompts: one used eight times, long ago; one used twice, the second time lately; one used once.
What comes first would change what comes later: what is not named is not asked."""


@pytest.mark.parametrize("name", ALONE)
def test_eviction(alone, name):
    """And --prefix-fetch never: what left the arena is in the DRAM of the node, which the pool counts."""
    (node,) = alone[name].nodes
    often, twice, late, once, other, another = (ids(n, PROMPT + 1) for n in range(6))
    for prompt in (*[often] * 8, twice, twice, late, once, other, another):
        cached(node.url, prompt)
    assert cached(node.url, late) == PROMPT, "the arena is not full yet"
    for number in (6, 7):
        cached(node.url, ids(number, 2 * PROMPT + 1))
    prompts = {"late": late, "often": often, "once": once}
    wanted = KEPT[value(name, "eviction")]
    found = {which: cached(node.url, prompts[which]) for which in prompts if which in wanted}
    assert found == wanted
    settled(alone[name])


def test_shares(alone):
    """A prompt within the share of its class outlives a flood of another class."""
    found = {}
    for name in ("one", "five"):
        (node,) = alone[name].nodes
        cached(node.url, ids(20, PROMPT + 1), "standard")
        for number in range(21, 29):
            cached(node.url, ids(number, PROMPT + 1))
        found[value(name, "cache_shares")] = cached(node.url, ids(20, PROMPT + 1), "standard")
    assert found == {"none": 0, "standard=0.4": PROMPT}


QUEUED = {"batch long": 31, "batch short": 8, "standard long": 28, "standard short": 12}
"""Name -> tokens, in the order in which they come. None is longer than the least part of a step that class batch gets
while others wait, on however slow a machine."""
ANSWERED = {
    "fcfs": ["batch long", "batch short", "standard long", "standard short"],
    "edf": ["standard long", "standard short", "batch long", "batch short"],
    "srpt": ["batch short", "standard short", "standard long", "batch long"],
    "weighted-fair": ["standard long", "batch long", "standard short", "batch short"],
}


@pytest.mark.parametrize("name", ["one", "two", "three", "four"])
def test_queue_order_and_rejection(alone, name):
    """Both seats are taken; one is given back when all prompts are queued, and they are answered one by one."""
    (node,) = alone[name].nodes
    asked: dict[str, Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor(8) as pool, endless(node, 30):
        with endless(node, 31):
            for number, (which, count) in enumerate(QUEUED.items()):
                body = {"service_class": which.split()[0]}
                asked[which] = pool.submit(complete, node.url, ids(32 + number, count), 1, **body)
                wait_until(lambda: engine(node)["waiting"] == len(asked), which)
            urgent = pool.submit(complete, node.url, ids(36, 1000), 1, service_class="interactive")
            if value(name, "rejection") == "none":
                wait_until(lambda: engine(node)["waiting"] == len(asked) + 1, "urgent")
            else:
                refusal = urgent.exception(60)
                assert "answers 429: " in str(refusal) and "the objective of interactive is" in str(refusal)
        begun = {which: first_token(node.url, answer.result()["id"]) for which, answer in asked.items()}
        assert sorted(begun, key=begun.__getitem__) == ANSWERED[value(name, "queue_order")]
        if value(name, "rejection") == "none":
            assert urgent.result()["usage"]["completion_tokens"] == 1
    settled(alone[name])


def first_token(url: str, request_id: str) -> float:
    return next(float(event["t"]) for event in timeline(url, request_id)["events"] if event["event"] == "first_token")


@pytest.mark.parametrize("name", ["one", "two", "three", "five"])
def test_chunks_of_a_prompt(alone, steps, name):
    """2,000 tokens beside a stream that decodes: what the steps had of them, by --record-steps."""
    (node,) = alone[name].nodes
    before = len(lines(steps / name))
    with endless(node, 40):
        complete(node.url, ids(41, 2000), 1, service_class="standard")  # interactive ones may be refused
    settled(alone[name])
    found = [step["rows"] for step in lines(steps / name)[before:]]
    with_prompt = [rows for rows in found if any(tokens >= LEAST_PROMPT_ROW for tokens, _ in rows)]
    chunks = [tokens for rows in with_prompt for tokens, _ in rows if tokens >= LEAST_PROMPT_ROW]
    beside = [len(rows) - 1 for rows in with_prompt]
    policy = value(name, "batching_policy")
    if policy == "prefill-first":
        assert (chunks, beside) == ([2000], [0]), "the stream waits"
    elif policy == "decode-first":
        assert (chunks, beside) == ([2000], [1])
    elif policy == "mixed":
        assert (chunks, beside) == ([1024, 976], [1, 1])
    else:
        assert policy == "dynamic" and len(chunks) > 1 and set(beside) == {1}, chunks


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ON_DISK)
def test_ssd_backends(alone, name):
    """Blocks of a prompt get to the files of the backend."""
    (node,) = alone[name].nodes
    cached(node.url, ids(45, PROMPT + 1))
    path = Path(rest.get(f"{node.url}/debug/state")["config"]["ssd_path"])
    wait_until(lambda: rest.get(f"{node.url}/debug/state")["store"]["ssd"]["writes"] >= PROMPT // BLOCK, "on disk")
    assert SSD_FILES[value(name, "ssd_backend")] <= {file.name for file in path.iterdir()}


# --- the cluster


def test_nodes_run_with_what_the_table_says(alone, together):
    nodes = {name: cluster.nodes[0] for name, cluster in alone.items()} | {node.name: node for node in together.nodes}
    for name, node in nodes.items():
        config = rest.get(f"{node.url}/debug/state")["config"]
        assert {field: config[field] for field in ROWS} == {field: value(name, field) for field in ROWS}, name


def test_roles_at_the_start(alone, together):
    def does(node: Node) -> set[str]:
        records = {one["node_id"]: one for one in rest.get(f"{node.url}/live")["nodes"]}
        return set(records[node.name]["load"]["does"]) & {"prefill", "decode"}

    assert does(alone["one"].nodes[0]) == {"prefill", "decode"}
    assert does(together["prefill+decode-0"]) == {"prefill"}
    assert does(together[DECODE]) == {"decode"}


def test_speculation_gives_the_same_tokens(alone, together):
    """Greedy and drawn; without a guess, with n-grams, suffixes and a draft model, which is the model itself: both
    rules accept its guesses."""
    guessing = ("one", "three", "four", "five", "six")
    nodes = {name: alone[name].nodes[0] for name in guessing} | {"draft": together[DECODE]}
    prompt = [100, 200, 300, 400] * 12 + [500]
    for body in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        texts = {
            name: complete(node.url, prompt, 40, ignore_eos=True, **body)["choices"][0]["text"]
            for name, node in nodes.items()
        }
        assert len(set(texts.values())) == 1, texts
    assert engine(nodes["one"])["speculation"] is None
    for name in ("three", "four", "five", "draft"):
        assert engine(nodes[name])["speculation"]["accepted_tokens"] > 0, name


def decisions(url: str, prompt: list[int], count: int) -> list[dict[str, Any]]:
    """What `explain` says of equal requests one after the other."""
    found = [timeline(url, complete(url, prompt, 1)["id"])["decisions"] for _ in range(count)]
    return [decision for (decision,) in found]


def test_how_kv_moved(together):
    """Once from each node that prefills, in turn."""
    url = together["store-3"].url
    for number in range(3):
        record = timeline(url, complete(url, ids(50 + number, 100), 4, ignore_eos=True)["id"])
        node = record["summary"]["nodes"]["prefill"]
        (moved,) = [event["detail"] for event in record["events"] if event["event"] == "kv_moved"]
        assert (moved["how"], moved["overlap"]) == (value(node, "kv_transfer"), value(node, "kv_overlap"))


def test_groups_of_prefill_nodes(together):
    """The node that accepts a long prompt decides; what a group does is in test_pipeline.py. A node that was busy a
    moment ago is left out, so a group forms for one of three prompts."""
    for number, (node, forms) in enumerate((("store-3", False), ("store-4", True), ("store-5", True))):
        formed = False
        for again in range(3):
            prompt = ids(700 + 10 * again + number, GROUPED + 100)
            record = timeline(together[node].url, complete(together[node].url, prompt, 2, ignore_eos=True)["id"])
            grouped = record["summary"]["placement"]["group"] is not None
            computed = {event["node"] for event in record["events"] if event["event"] == "computed"} & PREFILLS
            assert (len(computed) > 1) == grouped
            formed |= grouped
            settled(together)
            if formed:
                break
        assert formed == forms


def test_prefixes_from_the_pool(together):
    """A node that has not computed the prompt finds it in the pool; best effort stops after a window where nothing
    else runs, and where the time is over before the first block is here, all is computed."""
    url = together["store-3"].url
    count = 2 * WINDOW_BLOCKS * 16
    found: dict[str, set[int]] = {}
    for number in (60, 61):  # two, begun on different nodes
        for again in range(4):
            answer = complete(url, ids(number, count + 1), 1)
            node = timeline(url, answer["id"])["summary"]["nodes"]["prefill"]
            if 0 < again < 3:
                found.setdefault(node, set()).add(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            settled(together)
    assert found.keys() == PREFILLS
    assert found == {"prefill-0": {count}, "prefill-1": {count // 2}, "prefill+decode-0": {0}}


def test_admission_to_a_full_share(together):
    """Shares take the blocks of new prompts for others by their own rule."""
    url = together["store-3"].url
    names = [f"store-{number}" for number in range(4)]

    def dram() -> dict[str, dict[str, int]]:
        settled(together)
        return {name: rest.get(f"{together[name].url}/debug/state")["store"]["dram"] for name in names}

    def put(numbers: range, service_class: str) -> None:
        for number in numbers:
            cached(url, ids(number, 1000), service_class)

    put(range(90, 108), "interactive")
    full = dram()
    assert all(one["blocks"] == one["capacity"] for one in full.values()), full
    put(range(110, 116), "batch")
    batch = dram()
    put(range(120, 126), "interactive")
    interactive = dram()
    taken = {name: (batch[name]["evictions"] - full[name]["evictions"], batch[name]["refused"]) for name in names}
    assert taken["store-0"][0] > 0 and taken["store-0"][1] == 0
    for name in names[1:]:
        assert taken[name][0] == 0 and taken[name][1] > 0, taken
    later = {name: interactive[name]["evictions"] - batch[name]["evictions"] for name in names}
    assert later["store-0"] > 0 and later["store-3"] > 0 and later["store-2"] == later["store-1"] == 0, later


STICKY = ("local-cache", "dynamo-cost", "llm-d", "preble")
"""Policies that ask everybody, and send a known prompt where the answers say that it is known."""


@pytest.mark.parametrize("name", TOGETHER)
def test_placement(together, name):
    """Whom it asks, whether it goes where the prompt is known, and whether KV may come from elsewhere."""
    policy = value(name, "placement")
    number = 200 + list(TOGETHER).index(name)
    prompt = ids(number, 400)
    found = decisions(together[name].url, prompt, 1)
    settled(together)  # its blocks are cached: the others are placed with the same knowledge
    if policy in STICKY:
        heard = []
        for _ in range(60):
            settled(together)  # the load of the last one, told late on a busy machine, outweighs so small a prompt
            (decision,) = decisions(together[name].url, prompt, 1)
            if len(decision["probes"]) == decision["asked"]:  # on a busy machine an answer may come too late to count
                heard.append(decision)
            if len(heard) == 12:
                break
        assert len(heard) == 12, "all nodes answered"
        found += heard
    else:
        found += decisions(together[name].url, prompt, 5 if policy == "round-robin" else 29)
    where = [one["prefill"] for one in found]
    asked = {one["asked"] for one in found}
    print(policy, where, asked)
    assert set(where) <= PREFILLS and {one["decode"] for one in found} == {DECODE}
    if policy in ("random", "least-load"):
        assert asked == {0} and len(set(where)) > 1, "nobody looks at what is cached"
    elif policy == "round-robin":
        assert asked == {0} and where[:3] == where[3:] and set(where) == PREFILLS
    elif policy == "power-of-two":
        assert asked == {3}, "two that prefill and the only one that decodes"
    elif policy in STICKY:
        assert asked == {ENGINES} and set(where[1:]) == {where[0]}
        assert {one["prefix_source"] for one in found} <= {"none", "local"}
    elif policy == "mooncake-central-greedy":
        assert asked == {ENGINES}
    else:
        assert policy in ("mooncake", "mooncake-learned", "mooncake-cost") and all(one["asked"] for one in found)
