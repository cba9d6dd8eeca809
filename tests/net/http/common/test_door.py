"""Refusals before the HTTP server reads the request: only of plain requests, and the same as those of handlers."""

from __future__ import annotations

import asyncio
from email.parser import BytesHeaderParser

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from net.http.common.door import Door, plain
from net.http.common.frontend import Overloaded, Unavailable
from net.http.common.keys import ApiKeys
from tests.net.fake_frontend import FakeFrontend, serving

PATH = "/v1/completions"
BODY = b'{"prompt": "a"}'


def request(
    body: bytes = BODY, first: str = f"POST {PATH} HTTP/1.1", length: object = None, more: tuple[str, ...] = ()
) -> bytes:
    size = f"Content-Length: {len(body) if length is None else length}"
    lines = [first, "Host: x", size, "Content-Type: application/json", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


NOT_PLAIN = {
    "another method": request(first=f"GET {PATH} HTTP/1.1"),
    "another version": request(first=f"POST {PATH} HTTP/1.0"),
    "a query": request(first=f"POST {PATH}?a=1 HTTP/1.1"),
    "a part of the head": request()[:40],
    "more than one": request() + request(),
    "no length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n" + BODY,
    "a signed length": request(length=f"+{len(BODY)}"),
    "two lengths": request(more=(f"content-length: {len(BODY)}",)),
    "chunks": request(more=("Transfer-Encoding: chunked",)),
    "a question before the body": request(more=("Expect: 100-continue",)),
    "another protocol": request(more=("Connection: Upgrade", "Upgrade: h2c")),
    "a page of a browser": request(more=("Origin: http://evil.example",)),
    "a folded line": request(more=("X-A: b", " c")),
    "a space before the colon": request(more=("X-A : b",)),
    "a header that is no text": b"POST /v1/completions HTTP/1.1\r\nX: \xff\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("data", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_not_plain_is_left_to_the_http_server(data):
    door = full()
    assert plain(data) is None and door.refusal("a", data) is None
    assert plain(request(more=("X-A:", "Connection: close"))) is not None


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 60))
def test_any_bytes_are_read(garbage, at, cut):
    whole = request()
    plain(garbage)
    plain(whole[:at] + garbage + whole[at + cut :])


def full() -> Door:
    def check_room(ahead: int) -> None:
        raise Overloaded(f"{ahead} wait", 1.2)

    return Door(check_room, [PATH], lambda headers: headers.get("X-Key") != "wrong")


def test_only_known_clients_of_generating_routes_are_refused():
    door = full()
    assert door.refusal("a", request(first="POST /tokenize HTTP/1.1")) is None
    assert door.refusal("a", request(more=("x-key: wrong",))) is None, "a handler says that the key is wrong"
    told = door.refusal("a", request(more=("X-Request-Id: mine",)))
    assert told is not None
    head, answer = told
    first, _, rest = answer.partition(b"\r\n")
    assert first == b"HTTP/1.1 429 Too Many Requests" and not head.closes
    headers = BytesHeaderParser().parsebytes(rest)
    assert (headers["Retry-After"], headers["X-Request-Id"], headers["Server"]) == ("2", "mine", "mooncake")
    body = rest.partition(b"\r\n\r\n")[2]
    assert len(body) == int(headers["Content-Length"]) and orjson.loads(body)["error"]["code"] == "overloaded"
    closing = door.refusal("a", request(more=("Connection: Close",)))
    assert closing is not None and closing[0].closes


def test_a_node_without_a_model_says_so():
    """It refuses every request at the door; the connection once ended there without an answer."""

    def check_room(ahead: int) -> None:
        raise Unavailable("a store without a model", 60.0)

    told = Door(check_room, [PATH], lambda headers: True).refusal("a", request())
    assert told is not None
    first, _, rest = told[1].partition(b"\r\n")
    assert first == b"HTTP/1.1 503 Service Unavailable"
    assert BytesHeaderParser().parsebytes(rest)["Retry-After"] == "60"
    assert orjson.loads(rest.partition(b"\r\n\r\n")[2])["error"]["message"] == "a store without a model"


@pytest.mark.parametrize("arrived", range(len(BODY) + 1))
def test_a_body_may_arrive_later(arrived):
    whole = request()
    head = plain(whole[: len(whole) - len(BODY) + arrived])
    assert head is not None and head.unread == len(BODY) - arrived


def test_those_let_in_count_until_their_handlers_begin():
    asked: list[int] = []
    door = Door(asked.append, [PATH], lambda headers: True)
    for name in "abc":
        assert door.refusal(name, request()) is None
    door.leave("b")
    door.leave("b")
    door.arriving = 5
    assert door.refusal("d", request()) is None
    door.check()
    assert asked == [0, 1, 2, 5 + 2, 5]


async def test_refused_before_a_handler_and_served_on_the_same_connection(monkeypatch):
    frontend = FakeFrontend()
    frontend.places = 1
    handled: list[str] = []
    begin = aiohttp.web.RequestHandler._handle_request

    async def counted(self, request, *arguments):
        handled.append(request.path)
        return await begin(self, request, *arguments)

    monkeypatch.setattr(aiohttp.web.RequestHandler, "_handle_request", counted)
    async with serving(frontend) as url, aiohttp.ClientSession(url) as session:

        async def ask(prompt: str) -> tuple[int, str | None]:
            async with session.post(PATH, json={"prompt": prompt, "max_tokens": 2}) as response:
                await response.read()
                return response.status, response.headers.get("Retry-After")

        hanging = asyncio.create_task(ask("!hang"))
        await frontend.started.wait()
        assert [await ask("a") for _ in range(3)] == [(429, "2")] * 3
        assert handled == [PATH], "no handler saw the refused ones"
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        await frontend.idle.wait()
        assert await ask("a") == (200, None)
        assert await ask("a") == (200, None), "the HTTP server reads the connection from now on"
        assert handled == [PATH] * 3
    assert not frontend.open


async def test_wrong_keys_are_told_so_while_there_is_no_room():
    frontend = FakeFrontend()
    frontend.places = 0
    async with serving(frontend, keys=ApiKeys("the-right-key")) as url, aiohttp.ClientSession(url) as session:
        statuses = []
        for key in ("wrong", "the-right-key"):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(PATH, json={"prompt": "a"}, headers=headers) as response:
                statuses.append(response.status)
    assert statuses == [401, 429]


@pytest.mark.parametrize("ends", [("Connection: close",), ()])
async def test_the_answer_comes_before_the_body_and_the_next_request_is_found_behind_it(ends):
    frontend = FakeFrontend()
    frontend.places = 0
    whole = request(more=ends)
    async with serving(frontend) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        for _ in range(1 if ends else 3):
            writer.write(whole[:-9])
            assert (await reader.readline()).startswith(b"HTTP/1.1 429")
            told = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in told.split(b"\r\n") if line.startswith(b"Content-Length"))
            assert orjson.loads(await reader.readexactly(int(length.split()[1])))["error"]["code"] == "overloaded"
            writer.write(whole[-9:])
        if ends:
            assert await reader.read() == b""
        else:
            frontend.places = 1
            writer.write(request(b'{"prompt": "ab", "max_tokens": 1}'))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
