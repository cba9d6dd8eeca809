"""Hang-ups, ids, and the routes that generate nothing."""

from __future__ import annotations

import asyncio

import aiohttp
import orjson
import pytest

from engine.sampling.params import SamplingParams
from net.bodies import decode, encode
from net.http.openai.schema import SERVICE_CLASSES
from sched.classes import CLASSES
from tests.net.fake_frontend import FakeFrontend, serving


@pytest.fixture
async def frontend():
    return FakeFrontend()


@pytest.fixture
async def api(frontend):
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        yield session


async def test_words_agree_with_the_engine(api, frontend):
    assert tuple(CLASSES) == SERVICE_CLASSES
    async with api.post("/v1/completions", json={"prompt": "ab", "stop": "x", "logit_bias": {"1": 2}}) as response:
        assert response.status == 200
    sampling = SamplingParams(**frontend.calls[0]["sampling"])
    assert decode(SamplingParams, orjson.loads(orjson.dumps(encode(sampling)))) == sampling


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["!hang", "!hang-later", ["!hang", "!hang-later", "ab"]])
async def test_a_hang_up_closes_every_generation(api, frontend, prompt, stream):
    body = {"prompt": prompt, "stream": stream, "max_tokens": 9}
    request = asyncio.create_task(api.post("/v1/completions", json=body))
    await frontend.started.wait()
    await asyncio.sleep(0)
    if stream and prompt == "!hang-later":
        response = await request
        await response.content.readany()
        response.close()
    else:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    async with asyncio.timeout(10):
        await frontend.idle.wait()
    assert not frontend.open


async def test_a_client_that_never_reads_and_leaves(frontend):
    frontend.max_model_len = 1 << 30
    async with serving(frontend) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
        body = orjson.dumps({"prompt": "ab", "max_tokens": 1 << 29, "stream": True})
        kind = "Content-Type: application/json"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readline()
        async with asyncio.timeout(60):
            while not await frontend.stalled():  # until every buffer between server and client is full
                pass
            assert frontend.open
            writer.transport.abort()
            await frontend.idle.wait()


async def test_a_failing_choice_closes_the_others(api, frontend):
    async with api.post("/v1/completions", json={"prompt": ["!hang", "!overloaded"]}) as response:
        assert response.status == 429
    assert not frontend.open


async def test_closing_the_server_ends_generations(frontend):
    async with aiohttp.ClientSession() as session:
        async with serving(frontend) as url:
            request = asyncio.create_task(session.post(f"{url}/v1/completions", json={"prompt": "!hang"}))
            await frontend.started.wait()
        assert not frontend.open
        with pytest.raises(aiohttp.ClientError):
            await request


async def test_request_id(api, frontend):
    body = {"prompt": "ab", "max_tokens": 1}
    async with api.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id.1"}) as response:
        assert response.headers["X-Request-Id"] == "my-id.1"
        assert (await response.json())["id"] == "cmpl-my-id.1"
    assert frontend.calls[0]["request_id"] == "my-id.1"
    async with api.post("/v1/completions", json=body | {"stream": True}, headers={"X-Request-Id": "s"}) as response:
        assert (response.headers["X-Request-Id"], response.headers["Server"]) == ("s", "mooncake")
    for unfit in ("a b", "x" * 200, "<script>"):
        async with api.post("/v1/completions", json=body, headers={"X-Request-Id": unfit}) as response:
            assert response.headers["X-Request-Id"] != unfit
    async with api.get("/debug/requests/cmpl-my-id.1") as response:
        assert await response.json() == {"request_id": "my-id.1"}
    async with api.get("/debug/requests/unheard-of") as response:
        assert response.status == 404


async def test_equal_request_ids_at_the_same_time(api, frontend):
    headers = {"X-Request-Id": "twice"}
    hanging = asyncio.create_task(api.post("/v1/completions", json={"prompt": "!hang"}, headers=headers))
    await frontend.started.wait()
    async with api.post("/v1/completions", json={"prompt": "ab"}, headers=headers) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] == "twice"
        assert (await response.json())["id"] == "cmpl-twice"
    async with api.get("/load") as response:
        assert await response.json() == {"server_load": 1}
    hanging.cancel()
    assert [call["request_id"] for call in frontend.calls] == ["twice", "twice"], "its draws follow from its id"


async def test_class_header(api, frontend):
    url, body = "/v1/completions", {"prompt": "ab", "service_class": "interactive"}
    async with api.post(url, json=body, headers={"X-Mooncake-Class": "batch"}) as response:
        assert response.status == 200
    async with api.post(url, json={"prompt": "ab", "priority": -1}) as response:
        assert response.status == 200
    assert [call["service_class"] for call in frontend.calls] == ["batch", "interactive"]


@pytest.mark.parametrize("wrong", ["royal", "", "Interactive", "0"])
@pytest.mark.parametrize("url", ["/v1/completions", "/v1/chat/completions"])
async def test_a_wrong_class_header_is_named(api, frontend, url, wrong):
    body = {"prompt": "ab"} if "chat" not in url else {"messages": [{"role": "user", "content": "ab"}]}
    async with api.post(url, json=body, headers={"X-Mooncake-Class": wrong}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "X-Mooncake-Class")
    assert "interactive, standard, batch" in error["message"]
    assert frontend.calls == []


@pytest.mark.parametrize(
    ("body", "header", "wanted"),
    [
        ({}, None, "standard"),
        ({"priority": 0}, None, "standard"),
        ({"priority": -5}, None, "interactive"),
        ({"priority": 7}, None, "batch"),
        ({"priority": 7, "service_class": "standard"}, None, "standard"),
        ({"priority": 7, "service_class": "standard"}, "interactive", "interactive"),
        ({"service_class": None, "priority": None}, None, "standard"),
    ],
)
async def test_header_then_class_then_priority(api, frontend, body, header, wanted):
    headers = {"X-Mooncake-Class": header} if header else {}
    async with api.post("/v1/completions", json={"prompt": "ab"} | body, headers=headers) as response:
        assert response.status == 200
    assert frontend.calls[0]["service_class"] == wanted


async def test_events_on_the_wire(api):
    body = {"prompt": "ab", "max_tokens": 2, "stream": True, "return_token_ids": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with api.post("/v1/completions", json=body | options) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = await response.read()
    events = raw.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[:2]] == [[97], [98]]


async def test_token_ids_of_a_whole_answer(api):
    async with api.post(
        "/v1/completions", json={"prompt": "ab", "max_tokens": 3, "return_token_ids": True}
    ) as response:
        choice = (await response.json())["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([97, 98, 97], [97, 98])


async def test_long_texts_are_tokenized_aside(frontend):
    frontend.max_model_len = 200_000
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:
        body = {"prompt": "a" * 100_000, "max_tokens": 1}
        async with session.post("/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == 100_000


async def test_tokens(api):
    async with api.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}) as response:
        assert await response.json() == {
            "count": 2,
            "max_model_len": 2000,
            "tokens": [97, 98],
            "token_strs": ["a", "b"],
        }
    async with api.post("/tokenize", json={"messages": [{"role": "user", "content": "abc"}]}) as response:
        assert (await response.json())["count"] == 3
    async with api.post("/detokenize", json={"tokens": [97, 98]}) as response:
        assert await response.json() == {"prompt": "ab"}
    async with api.get("/tokenizer_info") as response:
        assert (await response.json())["eos_token"] == "<special>"


async def test_models_carry_root_and_length(api):
    async with api.get("/v1/models") as response:
        model = (await response.json())["data"][0]
    assert (model["id"], model["root"], model["max_model_len"]) == ("fake", "fake/root", 2000)
    async with api.get("/v1/models/other") as response:
        assert response.status == 404


async def test_state_routes(api, frontend):
    for path, answer in {"/cluster": {"members": []}, "/debug/state": {"running": 0}}.items():
        async with api.get(path) as response:
            assert await response.json() == answer
    async with api.get("/version") as response:
        assert await response.json() == {"version": "unknown"}
    async with api.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        assert await response.read() == b"# fake\n"
    async with api.get("/health") as response:
        assert response.status == 200 and await response.json() == {"status": "ok"}
    frontend.masked = {"1": "its process has ended"}
    async with api.get("/health") as response:
        assert response.status == 200 and (await response.json())["masked_ranks"] == frontend.masked
    frontend.sick = "leaving the cluster"
    async with api.get("/health") as response:
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "leaving the cluster"


async def test_a_port_in_use_is_an_oserror(frontend):
    async with serving(frontend) as url:
        from net.http import HttpServer, create_app

        server = HttpServer(create_app(frontend))
        with pytest.raises(OSError):
            await server.start("127.0.0.1", int(url.rpartition(":")[2]))
