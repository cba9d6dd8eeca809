"""One address for a vLLM that computes prompts and a vLLM that decodes, both with MooncakeConnector.

    scripts/tools.py vllm-pair --prefill http://HOST:PORT --bootstrap http://HOST:8998 --decode http://HOST:PORT

It serves POST /v1/completions and /v1/chat/completions on --port and passes other requests to the decoding vLLM. Both
get each request at the same time: the first computes one token and keeps the prompt's KV until the second has fetched
it. `transfer_id` says to both which request it is, `remote_engine_id` to the second who has the KV. If the first
refuses a request, its answer goes to the client.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from lab.bench.common.client import open_session
from lab.flag_types import port

GENERATING = ("/v1/completions", "/v1/chat/completions")
MOST_BYTES = 64 << 20
NOT_FOR_ONE_TOKEN = ("stream", "stream_options", "max_completion_tokens", "min_tokens")


@dataclass(frozen=True, slots=True)
class Pair:
    """Where the two run."""

    prefill: str
    bootstrap: str
    decode: str


def bodies(body: dict[str, Any], engine_id: str, bootstrap: str, transfer_id: str) -> tuple[bytes, bytes]:
    """The request as the prefilling and as the decoding vLLM get it."""
    first = {name: value for name, value in body.items() if name not in NOT_FOR_ONE_TOKEN} | {"max_tokens": 1}
    first["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    then = body | {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": bootstrap,
            "transfer_id": transfer_id,
        }
    }
    return orjson.dumps(first), orjson.dumps(then)


class Proxy:
    """The handlers of one pair."""

    def __init__(self, pair: Pair, session: aiohttp.ClientSession) -> None:
        self._pair, self._session = pair, session

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the body is not JSON")
        try:
            # Asked each time: a prefilling vLLM that has restarted has another id.
            engine_id = await self._engine_id()
            first, then = bodies(body, engine_id, self._pair.bootstrap, secrets.token_hex(12))
            return await self._both(request, first, then)
        except aiohttp.ClientError as error:
            return _error(502, f"a vLLM of the pair does not answer: {error}")

    async def _both(self, request: web.Request, first: bytes, then: bytes) -> web.StreamResponse:
        prefilling = asyncio.create_task(self._prefill(request.path, first))
        answering = asyncio.create_task(self._post(self._pair.decode + request.path, then))
        try:
            await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if prefilling.done() and (refusal := prefilling.result()) is not None:
                return refusal
            return await _pass_on(request, await answering)
        finally:
            prefilling.cancel()
            answering.cancel()
            ends = await asyncio.gather(prefilling, answering, return_exceptions=True)
            if isinstance(ends[1], aiohttp.ClientResponse):
                ends[1].close()

    async def other(self, request: web.Request) -> web.StreamResponse:
        url = self._pair.decode + request.path_qs
        try:
            async with self._session.request(request.method, url, data=await request.read()) as answer:
                return await _pass_on(request, answer)
        except aiohttp.ClientError as error:
            return _error(502, f"the decoding vLLM does not answer: {error}")

    async def _engine_id(self) -> str:
        async with self._session.get(f"{self._pair.bootstrap}/query") as answer:
            answer.raise_for_status()
            workers = await answer.json()
        engine_id: str = next(iter(workers.values()))["engine_id"]
        return engine_id

    async def _prefill(self, path: str, body: bytes) -> web.Response | None:
        """Its answer if it refuses the request."""
        async with await self._post(self._pair.prefill + path, body) as answer:
            text = await answer.read()
            if answer.status == 200:
                return None
            return web.Response(body=text, status=answer.status, content_type=answer.content_type)

    async def _post(self, url: str, body: bytes) -> aiohttp.ClientResponse:
        return await self._session.post(url, data=body, headers={"Content-Type": "application/json"})


PROXY = web.AppKey("proxy", Proxy)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    passed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
    await passed.prepare(request)
    async for piece in answer.content.iter_any():
        await passed.write(piece)
    await passed.write_eof()
    return passed


def application(pair: Pair) -> web.Application:
    async def with_session(app: web.Application) -> AsyncIterator[None]:
        async with open_session() as session:
            app[PROXY] = Proxy(pair, session)
            yield

    async def generate(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].generate(request)

    async def other(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].other(request)

    app = web.Application(client_max_size=MOST_BYTES)
    app.cleanup_ctx.append(with_session)
    for path in GENERATING:
        app.router.add_post(path, generate)
    app.router.add_route("*", "/{any:.*}", other)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser("tools.py vllm-pair", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, metavar="URL", help="the vLLM with kv_role kv_producer")
    parser.add_argument("--bootstrap", required=True, metavar="URL", help="its VLLM_MOONCAKE_BOOTSTRAP_PORT")
    parser.add_argument("--decode", required=True, metavar="URL", help="the vLLM with kv_role kv_consumer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8000)
    args = parser.parse_args(argv)
    urls = [url.rstrip("/") for url in (args.prefill, args.bootstrap, args.decode)]
    web.run_app(application(Pair(*urls)), host=args.host, port=args.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
