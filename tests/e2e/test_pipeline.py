"""Long prompts on several prefill nodes (--prefill-parallel): the same tokens as one node, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from lab.faults.checks import form
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, complete, model_of, settled, timeline, wait_until

WHEN = (
    "--cpp-min-tokens",
    "400",
    "--max-num-batched-tokens",
    "128",
    "--block-size",
    "32",
    "--cpp-min-gain=-100",  # whatever the estimates say
)
GROUPS = ("--prefill-parallel", "cpp", *WHEN)
BY_TOKENS = ("--prefill-parallel", "cp", *WHEN)
EVERY = ("--calibration-ms", "300", "--num-threads", "1", "--kv-cache-bytes", "16M", "--prefix-fetch", "always")
LONG, BASE = 1500, 700
KNOWN = (20, 22, 24)
"""Numbers of prompts of which the first BASE tokens are known; no other prompt begins as they do."""


def prompt(number: int) -> list[int]:
    return [5 + number + i * 13 % 40000 for i in range(LONG)]


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def events(url: str, answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in timeline(url, answer["id"])["events"] if event["event"] == name]


def longer(number: int) -> list[int]:
    """A prompt that begins as `prompt(number)` for BASE tokens."""
    return prompt(number)[:BASE] + prompt(number + 1)[: LONG - 300]


@pytest.fixture(scope="module")
def right(start: Start, tiny_model: list[str]) -> dict[str, Any]:
    """The answers of one node."""
    with start("mixed=1", *tiny_model, *EVERY) as cluster:
        url = cluster.nodes[0].url
        return {
            "prompt": [text(complete(url, prompt(number), 8)) for number in range(4)],
            "longer": {number: text(complete(url, longer(number), 8)) for number in (0, *KNOWN)},
        }


def stages_of(url: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What the stages of all its pipelines did, in the order of their layers."""
    return sorted((one["detail"] for one in events(url, answer, "stage")), key=lambda stage: stage["index"])


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_a_group_gives_the_tokens_of_one_node(start: Start, tiny_model, right, nodes):
    """Every stage computes its own layers and sends their KV itself; the decode node publishes the whole blocks. Stages
    of a later prompt load all layers of its known part from the pool, and compute their own layers of the rest.

    A group forms when it promises to be faster, so on a busy machine a prompt may be computed by one node."""
    with start(f"prefill={nodes},decode=1,store=1", *tiny_model, *EVERY, *GROUPS) as cluster:
        url = cluster["decode-0"].url
        for number in range(4):
            answer = complete(url, prompt(number), 8)
            assert text(answer) == right["prompt"][number]
            if len(stages := stages_of(url, answer)) == nodes:
                break
        assert [stage["index"] for stage in stages] == list(range(nodes))
        layers = [stage["layers"] for stage in stages]
        assert layers[0][0] == 0 and layers[-1][1] == 3 and all(a[1] == b[0] for a, b in pairwise(layers))
        assert {one["node"] for one in events(url, answer, "kv_moved")} == set(stages[0]["nodes"])
        assert stages[0]["sent_bytes"] == LONG * 64 * 4 and stages[-1]["sent_bytes"] == 0
        assert sum(stage["chunks"] for stage in stages) >= nodes * (LONG // 128)
        settled(cluster)
        assert rest.get(f"{cluster['store-0'].url}/debug/state")["store"]["dram"]["blocks"] > 0
        short = complete(url, prompt(2)[:100], 8)
        assert not events(url, short, "stage")

        for number in KNOWN:
            complete(url, prompt(number)[:BASE], 1)
            settled(cluster)
            answer = complete(url, longer(number), 8)
            assert text(answer) == right["longer"][number]
            if stages := stages_of(url, answer):
                break
        assert len(stages) > 1 and {stage["prefix_tokens"] for stage in stages} == {BASE // 32 * 32}
        settled(cluster)


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-transfer", "pull", "--kv-overlap", "chunk"),
        pytest.param(("--kv-overlap", "none", "--no-enable-prefix-caching"), marks=pytest.mark.heavy),
        pytest.param(("--transport", "tcp", "--max-num-seqs", "1"), marks=pytest.mark.heavy),
    ],
    ids=lambda flags: flags[1],
)
def test_however_kv_moves(start: Start, tiny_model, right, flags):
    """Three long prompts at once, again until one of them was computed by a group: a node that was busy a moment ago
    is left out."""
    with start("prefill=2,decode=1", *tiny_model, *EVERY, *GROUPS, *flags) as cluster:
        url = cluster["decode-0"].url
        grouped: list[dict[str, Any]] = []
        for again in range(5):
            ask = partial(complete, url, max_tokens=8, cache_salt=f"again {again}")  # computed, not found
            with ThreadPoolExecutor(3) as threads:
                answers = list(threads.map(ask, map(prompt, range(3))))
            assert [text(answer) for answer in answers] == right["prompt"][:3]
            if grouped := [answer for answer in answers if events(url, answer, "stage")]:
                break
            settled(cluster)
        assert grouped, "no long prompt was computed by a group"
        for answer in grouped:
            # The last tokens do not wait for what the nodes tell of their parts.
            wait_until(lambda: len(events(url, answer, "kv_moved")) == 2, "what both stages tell", 20)  # noqa: B023
            moved = events(url, answer, "kv_moved")
            assert {one["detail"]["how"] for one in moved} == {flags[1] if flags[0] == "--kv-transfer" else "push"}
        settled(cluster)


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_nodes_that_divide_the_tokens_give_the_tokens_of_one_node(start: Start, tiny_model, right, nodes):
    """Every node computes all layers of its tokens and sends their KV itself. Several prompts at once: groups have the
    same nodes in any order, and none waits for another. Then each node loads what is known."""
    known = BASE // 32 * 32
    with start(f"prefill={nodes},decode=1,store=1", *tiny_model, *EVERY, *BY_TOKENS) as cluster:
        url = cluster["decode-0"].url
        answers = list(ThreadPoolExecutor(4).map(lambda number: complete(url, prompt(number), 8), range(4)))
        assert [text(answer) for answer in answers] == right["prompt"]
        settled(cluster)  # what the nodes tell of their stages may come after the answer
        found = [stages_of(url, answer) for answer in answers]
        for number in range(4):  # busy nodes stay out of a group: now nothing else runs
            if any(len(parts) == nodes for parts in found):
                break
            answers.append(complete(url, prompt(number), 8, **salted(f"alone {number}")))
            assert text(answers[-1]) == right["prompt"][number]
            settled(cluster)
            found.append(stages_of(url, answers[-1]))
        assert any(len(parts) == nodes for parts in found), "no prompt was computed by a group of all nodes"
        for parts in [parts for parts in found if parts]:
            assert [part["index"] for part in parts] == list(range(len(parts)))
            assert sum(part["tokens"] for part in parts) == LONG - parts[0]["prefix_tokens"]
            sizes = [part["tokens"] for part in parts]
            assert max(sizes) - min(sizes) < 300, "the work is shared evenly"
            assert all(part["sent_bytes"] > 0 and part["sent_bytes"] % (32 * 2 * 2 * 16 * 4) == 0 for part in parts)
        for answer, parts in zip(answers, found, strict=True):
            if parts:
                assert {one["node"] for one in events(url, answer, "kv_moved")} == set(parts[0]["nodes"])
        settled(cluster)
        assert rest.get(f"{cluster['store-0'].url}/debug/state")["store"]["dram"]["blocks"] > 0
        answer = complete(url, longer(0), 8)
        assert text(answer) == right["longer"][0]
        assert all(part["prefix_tokens"] in (known, 0) for part in stages_of(url, answer))
        settled(cluster)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-transfer", "pull", "--kv-overlap", "chunk"),
        ("--kv-overlap", "none", "--no-enable-prefix-caching"),
        ("--transport", "tcp", "--max-num-seqs", "1", "--max-num-batched-tokens", "24"),
        ("--kv-cache-dtype", "int8"),
    ],
    ids=lambda flags: flags[1],
)
def test_however_kv_moves_if_nodes_divide_the_tokens(start: Start, tiny_model, right, flags):
    with start("prefill=2,decode=1", *tiny_model, *EVERY, *BY_TOKENS, *flags) as cluster:
        url = cluster["decode-0"].url
        answers = list(ThreadPoolExecutor(3).map(lambda number: complete(url, prompt(number), 8), range(3)))
        if "int8" not in flags:  # its rounding gives other tokens
            assert [text(answer) for answer in answers] == right["prompt"][:3]
        assert any(stages_of(url, answer) for answer in answers)
        settled(cluster)


@pytest.mark.parametrize("way", [GROUPS, BY_TOKENS], ids=lambda way: way[1])
def test_other_prompts_come_between_two_layers_of_a_chunk(start: Start, tiny_model, right, way):
    """Short prompts, one after another, while groups compute long ones: steps of the parts end early for them."""
    pauses, answered = 0, 0
    with start("prefill=2,decode=1", *tiny_model, *EVERY, *way, "--max-num-batched-tokens", "512") as cluster:
        url = cluster["decode-0"].url
        for attempt in range(8):
            with ThreadPoolExecutor(4) as clients:
                salt = salted(f"between {attempt}")
                asked = [clients.submit(complete, url, prompt(number), 8, **salt) for number in range(2)]
                while not all(one.done() for one in asked):
                    answered += 1
                    short = complete(url, prompt(900 + answered)[:40], 1)
                    assert short["usage"]["completion_tokens"] == 1
            answers = [one.result() for one in asked]
            assert [text(answer) for answer in answers] == right["prompt"][:2]
            settled(cluster)
            pauses += sum(part["pauses"] for answer in answers for part in stages_of(url, answer))
            if pauses:
                break
    assert pauses, f"no step of a part ended for one of {answered} short prompts"


SLOW = ("--max-num-batched-tokens", "32", "--block-size", "32")
"""Many steps per prompt: it is still computed when something happens to it."""


def begun(cluster: LocalCluster, answers: Sequence[Future[Any]], *names: str) -> bool:
    """Wait until these nodes, or all that prefill, have a stage of a prompt; False if all answers came first."""
    names = names or tuple(node.name for node in cluster.nodes if node.name.startswith("prefill"))
    while not all(answer.done() for answer in answers):
        states = [rest.get(f"{cluster[name].url}/debug/state") for name in names]
        if all(state["engine"]["held_for_requests"]["stages"] for state in states):
            return True
    return False


@pytest.fixture(scope="module", params=[GROUPS, BY_TOKENS], ids=lambda way: way[1])
def slow(start: Start, tiny_model: list[str], request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with start("prefill=3,decode=1,store=1", *tiny_model, *EVERY, *request.param, *SLOW) as cluster:
        yield cluster


def salted(name: str) -> dict[str, str]:
    """For a request that finds nothing of what other tests have asked for."""
    return {"cache_salt": name}


def test_an_abort_frees_every_node(slow):
    """A client that hangs up in the middle of a long prompt: nothing of it stays on any stage or on the decode node."""
    for number in range(3):
        with pytest.raises(TimeoutError):
            asyncio.run(hang_up(slow, slow["decode-0"].url, prompt(number), 0.05 * number))
        settled(slow)


def test_a_stage_that_hangs_is_a_pause(slow, right):
    """SIGSTOP: its connections stay open; gossip suspects it, and the acceptor does not wait for it."""
    url, stopped = slow["store-0"].url, slow["prefill-1"]
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(complete, url, prompt(0), 8, **salted("hangs"))
        caught = begun(slow, [answer], "prefill-1")
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            assert text(answer.result()) == right["prompt"][0]
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    if caught and events(url, answer.result(), "attempt_failed"):
        assert len(events(url, answer.result(), "placed")) > 1
    form(slow)
    settled(slow)


@pytest.mark.parametrize("victim", [pytest.param("prefill-0", marks=pytest.mark.heavy), "prefill-1"])
def test_a_stage_that_dies_is_a_pause(slow, right, victim):
    """The acceptor places its prompts again, on what is left; the clients get whole answers. Four prompts at once keep
    the stages busy, so that one is computed when the node dies."""
    url = slow["store-0"].url
    for attempt in range(4):
        if not slow[victim].alive:
            slow.restart(victim)
            form(slow)
        with ThreadPoolExecutor(4) as clients:
            salt = salted(f"{victim} dies {attempt}")
            asked = [clients.submit(complete, url, prompt(number), 8, **salt) for number in range(4)]
            if begun(slow, asked, victim):
                slow.kill(victim, signal.SIGKILL)
            answers = [one.result() for one in asked]
        assert [text(answer) for answer in answers] == right["prompt"]
        failed = [event["detail"]["reason"] for one in answers for event in events(url, one, "attempt_failed")]
        if any(victim in reason for reason in failed):
            break
    else:
        raise AssertionError("no stage could be killed in the middle of a prompt")
    settled(slow)
    if victim == "prefill-0":  # the other one comes behind
        slow.restart(victim)
        form(slow)


async def hang_up(cluster: LocalCluster, url: str, ids: list[int], after_s: float) -> None:
    """Ask, and close the connection `after_s` seconds after some node has a stage."""
    body = {"model": model_of(url), "prompt": ids, "max_tokens": 400, "temperature": 0}
    async with aiohttp.ClientSession() as session, asyncio.timeout(60) as patience:
        asked = asyncio.ensure_future(session.post(f"{url}/v1/completions", json=body))
        prefills = [node.url for node in cluster.nodes if node.name.startswith("prefill")]
        while not asked.done():
            states = [await asyncio.to_thread(rest.get, f"{one}/debug/state") for one in prefills]
            if any(state["engine"]["held_for_requests"]["stages"] for state in states):
                break
        patience.reschedule(asyncio.get_running_loop().time() + after_s)
        await asked
        await asyncio.sleep(60)


def free(cluster: LocalCluster) -> list[int]:
    """Blocks that the prefill nodes could hand out."""
    states = [rest.get(f"{node.url}/debug/state") for node in cluster.nodes if node.name.startswith("prefill")]
    return [state["engine"]["blocks"]["free"] + state["engine"]["blocks"]["cached"] for state in states]


def test_a_stage_gives_its_blocks_to_a_higher_class(start: Start, tiny_model, right):
    """Arenas with room for one long prompt: an interactive prompt takes the blocks of a batch prompt's stage. That
    prompt begins again and ends with the same tokens."""
    arenas = {"prefill": ["--kv-cache-bytes", str(1600 * 768)]}
    with start("prefill=2,decode=1", *tiny_model, *EVERY, *GROUPS, *SLOW, role_flags=arenas) as cluster:
        url = cluster["decode-0"].url
        for attempt in range(12):
            number, salt = attempt % 4, salted(f"arena {attempt}")  # a known prefix would leave few steps
            with ThreadPoolExecutor(2) as clients:
                batch = clients.submit(complete, url, prompt(number), 8, service_class="batch", **salt)
                while begun(cluster, [batch]) and min(free(cluster)) >= 12:
                    pass
                if not batch.done():
                    short = prompt(10 + number)[:390]
                    found = complete(url, short, 1, service_class="interactive", **salt)
                    assert found["usage"]["completion_tokens"] == 1
                assert text(batch.result()) == right["prompt"][number]
            failed = events(url, batch.result(), "attempt_failed")
            if any("went to other requests" in event["detail"]["reason"] for event in failed):
                break
        else:
            raise AssertionError("no stage lost its blocks")
        settled(cluster)


@pytest.mark.parametrize("way", [GROUPS, pytest.param(BY_TOKENS, marks=pytest.mark.heavy)], ids=lambda way: way[1])
def test_groups_with_room_for_one_do_not_wait_for_each_other(start: Start, tiny_model, right, way):
    """Each node has blocks for one long prompt, and several begin at once on different nodes. A group that could wait
    for another in a circle gives everything back at once: none ends because a node was silent for a minute."""
    arenas = {"prefill": ["--kv-cache-bytes", str(1600 * 768)]}
    with start("prefill=2,decode=1", *tiny_model, *EVERY, *way, *SLOW, role_flags=arenas) as cluster:
        url = cluster["decode-0"].url
        tried = 0
        for number in range(4):
            with ThreadPoolExecutor(4) as clients:
                salt = salted(f"at once {number}")
                asked = [clients.submit(complete, url, prompt(one), 8, **salt) for one in range(4)]
            answers = [one.result() for one in asked]
            assert [text(answer) for answer in answers] == right["prompt"]
            tried += sum("group" in event["detail"] for one in answers for event in events(url, one, "placed"))
            failed = [event["detail"]["reason"] for one in answers for event in events(url, one, "attempt_failed")]
            gave_way = ("its group", "has ended on the next stage")  # the stage before may say so first
            assert all(any(why in reason for why in gave_way) for reason in failed), failed
            assert not any("nothing came" in reason for reason in failed), failed
            settled(cluster)
        assert tried > 1, "single prompts may win all blocks, but some were first given to groups"
