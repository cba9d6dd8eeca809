"""A running cluster as its clients see it: the stock openai package, bad input, metrics, the timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import openai
import pytest

from engine.front.persistence import MAX_FUTILE_ATTEMPTS
from lab.clients.openai_checks import CHECKS, Checks
from lab.launch import rest
from lab.launch.cluster import LocalCluster
from tests.e2e.conftest import Start, model_of, settled, timeline, wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def cluster(start: Start) -> Iterator[LocalCluster]:
    with start("prefill=1,decode=1,store=1", "--max-model-len", "2048", "--kv-cache-bytes", "400M") as running:
        yield running
        settled(running)


@pytest.fixture
def url(cluster: LocalCluster) -> str:
    return cluster["decode-0"].url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as stock:
        yield stock


@pytest.fixture(scope="module")
def checks(cluster: LocalCluster) -> Checks:
    url = cluster["decode-0"].url
    return Checks(url, model_of(url))


@pytest.mark.parametrize("name", CHECKS)
def test_what_applications_do_with_the_openai_package(checks, name):
    """scripts/tools.py stock-clients runs these checks, and other clients, from environments of their own."""
    getattr(checks, name)()


def test_the_tokenizer_can_be_read(url):
    """lm-eval counts tokens here when it is given no tokenizer."""
    info = rest.get(f"{url}/tokenizer_info")
    assert (info["eos_token"], info["model_max_length"]) == ("<|im_end|>", 2048)
    assert "messages" in info["chat_template"]


def test_a_seeded_draw_repeats(client, url):
    body = {"model": model_of(url), "prompt": "The weather", "max_tokens": 12, "temperature": 1.0}
    texts = [client.completions.create(**body, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_end_the_text(client, url):
    body = {"model": model_of(url), "prompt": "1, 2, 3, 4, 5,", "max_tokens": 32, "temperature": 0}
    whole = client.completions.create(**body).choices[0].text
    stop = whole[6:9]
    choice = client.completions.create(**body, stop=stop).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_banned_and_allowed_tokens_hold_on_the_prefill_and_on_the_decode_node(client, url):
    body = {"model": model_of(url), "prompt": "1, 2, 3, 4, 5,", "max_tokens": 12, "temperature": 0}
    free = client.completions.create(**body, extra_body={"return_token_ids": True}).choices[0]
    assert "6" in free.text and "7" in free.text
    told = client.completions.create(**body, extra_body={"bad_words": ["6", "7,"]}).choices[0].text
    assert "6" not in told and "7," not in told
    some = sorted(set(free.token_ids[:4]))
    more = {"allowed_token_ids": some, "ignore_eos": True, "return_token_ids": True}
    assert set(client.completions.create(**body, extra_body=more).choices[0].token_ids) <= set(some)


def test_an_answer_continues_a_message(client, url):
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    answer = client.chat.completions.create(
        model=model_of(url), messages=begun, max_tokens=4, temperature=0, extra_body=more
    )
    assert answer.choices[0].message.content.startswith(" Paris")


def test_the_errors_of_the_estimates_are_reported(client, url):
    client.completions.create(model=model_of(url), prompt="The weather", max_tokens=8)
    live = rest.get(f"{url}/live")
    (own,) = [node for node in live["nodes"] if node["node_id"] == live["node_id"]]
    errors = own["recent"]["estimates"]
    assert {"wait_s", "prefill_s", "ttft_s", "handover_s", "step_s"} <= set(errors)
    assert errors["ttft_s"]["requests"] > 0 and errors["ttft_s"]["mape"] is not None


BAD = {
    "malformed JSON": (b'{"model": ', 400),
    "invalid UTF-8": (b'{"model": "\xff\xfe"}', 400),
    "wrong type": ({"prompt": {"a": 1}}, 400),
    "empty prompt": ({"prompt": ""}, 400),
    "no tokens": ({"prompt": []}, 400),
    "negative max_tokens": ({"prompt": "x", "max_tokens": -1}, 400),
    "negative temperature": ({"prompt": "x", "temperature": -1}, 400),
    "longer than the context": ({"prompt": [5] * 3000}, 400),
    "unknown token id": ({"prompt": [10**6]}, 400),
    "unknown field of an object": ({"prompt": "x", "response_format": {"type": "text", "surprise": 1}}, 400),
    "unknown model": ({"prompt": "x", "model": "nobody"}, 404),
    "10 MB body": (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 413),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_an_openai_error_and_the_server_lives_on(url, name):
    body, status = BAD[name]

    async def send() -> tuple[int, dict]:
        kwargs = {"data": body} if isinstance(body, bytes) else {"json": {"model": model_of(url)} | body}
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", headers=headers, **kwargs) as response,
        ):
            return response.status, await response.json()

    got, error = asyncio.run(send())
    assert got == status, error
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert rest.get(f"{url}/v1/models")["data"]


def test_every_node_answers_and_the_timeline_crosses_nodes(cluster):
    for node in cluster.nodes:
        body = {
            "model": model_of(node.url),
            "messages": QUESTION,
            "temperature": 0,
            "max_tokens": 8,
            "cache_salt": node.name,
        }
        answer = rest.post(f"{node.url}/v1/chat/completions", body)
        told = timeline(node.url, answer["id"])
        assert told["summary"]["nodes"] == {"acceptor": node.name, "prefill": "prefill-0", "decode": "decode-0"}
        assert told["summary"]["bytes_moved"]["shm"] > 0  # a salt of its own: nothing was there before
        assert told["summary"]["cached_tokens"] == 0
        names = [event["event"] for event in told["events"]]
        assert names[0] == "accepted" and names[-1] == "answered" and "kv_moved" in names


def test_a_client_may_use_its_request_id_again(cluster, client, url):
    """As load balancers do that send a request again: after an answer, after a cancellation, while one runs, and at
    another node. There are more requests than an acceptor makes attempts. The timeline is that of the newest one."""
    body = {"model": model_of(url), "prompt": [5, 6, 7], "temperature": 0}
    body |= {"extra_headers": {"X-Request-Id": "again"}, "extra_body": {"ignore_eos": True}}
    long = {"max_tokens": 1900, "stream": True}
    for max_tokens in range(1, 2 + MAX_FUTILE_ATTEMPTS):
        client.completions.create(**body, max_tokens=max_tokens)
        _newest_has(cluster, max_tokens)
    cancelled = client.completions.create(**body, **long)
    next(iter(cancelled))
    cancelled.close()
    assert client.completions.create(**body, max_tokens=10).id == "cmpl-again"
    running = client.completions.create(**body, **long)
    next(iter(running))
    assert client.completions.create(**body, max_tokens=11).id == "cmpl-again"
    running.close()
    _newest_has(cluster, 11)
    elsewhere = f"{cluster['store-0'].url}/v1"
    client.with_options(base_url=elsewhere).completions.create(**body, max_tokens=12)
    _newest_has(cluster, 12)


def _newest_has(cluster: LocalCluster, tokens: int) -> None:
    """Every node tells that the newest request `again` had these output tokens, once those that it asks answer in time;
    no attempt of it has failed."""

    def told() -> bool:
        found = [rest.get(f"{node.url}/live/requests/again") for node in cluster.nodes]
        assert "attempt_failed" not in {event["event"] for one in found for event in one["events"]}
        return {one["summary"]["output_tokens"] for one in found} == {tokens}

    wait_until(told, f"{tokens} tokens")


def test_metrics_have_the_names_that_routers_read(cluster, url):
    import urllib.request

    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"):
        assert name in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    count = next(value for name, value in values.items() if name.startswith("vllm:time_to_first_token_seconds_count"))
    assert float(count) > 0
    assert [v for name, v in values.items() if "cluster_members" in name and 'role="store"' in name] == ["1.0"]
