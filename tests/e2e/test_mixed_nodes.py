"""Nodes that compute and decode, and hold blocks for each other's prompts: none waits for another for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.conftest import Start, complete, settled

ARENA_TOKENS, TOKEN_BYTES, PROMPT, OUTPUT = 384, 768, 200, 8
FLAGS = ("--calibration-ms", "300", "--num-threads", "1", "--kv-cache-bytes", str(ARENA_TOKENS * TOKEN_BYTES))


def prompt(number: int) -> list[int]:
    return [5 + number * 211 + i * 13 % 40000 for i in range(PROMPT)]


def test_prompts_that_cross_are_all_answered(start: Start, tiny_model):
    """An arena has room for one of these prompts. At random, nodes are chosen so that each decodes what the other
    one is to compute."""
    with start("mixed=2", *tiny_model, *FLAGS, "--placement", "random") as cluster:
        url = cluster.nodes[0].url
        right = [complete(url, prompt(number), OUTPUT, ignore_eos=True) for number in range(4)]
        with ThreadPoolExecutor(12) as clients:
            asked = [clients.submit(complete, url, prompt(i % 4), OUTPUT, ignore_eos=True) for i in range(24)]
            for i, one in enumerate(asked):
                assert one.result()["choices"][0]["text"] == right[i % 4]["choices"][0]["text"]
        settled(cluster)


def test_nodes_with_a_shorter_context_than_the_acceptor_end_no_answer_early(start: Start, tiny_model):
    """At random, every node would be chosen: the prefill and the decode node for prompts that fill their context."""
    short = ["--max-model-len", str(PROMPT + 1)]
    flags = ("--calibration-ms", "100", "--num-threads", "1", "--kv-cache-bytes", "8M", "--placement", "random")
    role_flags = {"prefill-0": short, "decode-0": short}
    with start("mixed=1,prefill=1,decode=1", *tiny_model, *flags, role_flags=role_flags) as cluster:
        url = next(node.url for node in cluster.nodes if node.role == "mixed")
        for number in range(16):
            answer = complete(url, prompt(number), OUTPUT, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == OUTPUT
        settled(cluster)
