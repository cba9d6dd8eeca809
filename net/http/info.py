"""All routes that generate no text: models, tokens, health, metrics, and the node's state."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from net.channel.cluster_key import ClusterKey
from net.http.common.body import read_body
from net.http.common.errors import ApiError
from net.http.common.frontend import Frontend
from net.http.common.joining import IV_BYTES, SEALED_TYPE
from net.http.common.middleware import joining
from net.http.common.pieces import answer, encoded
from net.http.openai.prompts import check_ids, check_model, check_text, render_messages, unhurried
from net.http.openai.schema import DetokenizeBody, TokenizeBody

Find = Callable[[str], Awaitable[dict[str, Any] | None]]


def json_response(data: Any, status: int = 200) -> web.Response:
    body = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(status=status, body=body, content_type="application/json")


class Info:
    """Handlers that read the node's state."""

    def __init__(self, frontend: Frontend, version: str, cluster_key: ClusterKey | None = None) -> None:
        self._frontend = frontend
        self._version = version
        self._cluster_key = cluster_key
        self._created = int(time.time())

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        check_model(self._frontend, request.match_info["model"])
        return json_response(self._model())

    async def embeddings(self, request: web.Request) -> web.Response:
        raise ApiError(400, "the served model generates text; it has no embeddings", code="unsupported_endpoint")

    async def tokenize(self, request: web.Request) -> web.Response:
        body, size = await read_body(request, TokenizeBody)
        frontend = self._frontend
        check_model(frontend, body.model)
        if body.messages is None:
            text = body.prompt or ""
            check_text(frontend, len(text), "prompt")
            ids = await unhurried(len(text), partial(frontend.encode, text, body.add_special_tokens))
        else:
            arguments = body.template_arguments
            ids = await render_messages(
                frontend, body.messages, body.add_generation_prompt, arguments, body.tools, size
            )

        def content() -> dict[str, Any]:
            strings = [frontend.token_text(token_id) for token_id in ids] if body.return_token_strs else None
            return {"count": len(ids), "max_model_len": frontend.max_model_len, "tokens": ids, "token_strs": strings}

        return answer(await encoded(len(ids), content))

    async def detokenize(self, request: web.Request) -> web.Response:
        body, _ = await read_body(request, DetokenizeBody)
        check_model(self._frontend, body.model)
        check_ids(self._frontend, body.tokens, "tokens")
        text = await unhurried(len(body.tokens), partial(self._frontend.decode, body.tokens))
        return answer(await encoded(len(body.tokens), lambda: {"prompt": text}))

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        return json_response(self._frontend.tokenizer_info())

    async def health(self, request: web.Request) -> web.Response:
        reason = self._frontend.healthy()
        if reason is not None:
            raise ApiError(503, reason, code="unhealthy", headers={"Retry-After": "1"})
        masked = self._frontend.masked_ranks()
        return json_response({"status": "ok"} | ({"masked_ranks": masked} if masked else {}))

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": self._version})

    async def server_info(self, request: web.Request) -> web.Response:
        """As vLLM's: the configuration of the server."""
        config = self._frontend.state().get("config", {})
        return json_response({"version": self._version, "model": self._frontend.model_name, "config": config})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._frontend.metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def state(self, request: web.Request) -> web.Response:
        return json_response(self._frontend.state())

    async def timeline(self, request: web.Request) -> web.Response:
        """Takes the request id or the id of the response (cmpl-..., chatcmpl-...)."""

        async def here(request_id: str) -> dict[str, Any] | None:
            return self._frontend.timeline(request_id)

        return await self._timeline(request.match_info["request_id"], here)

    async def _timeline(self, request_id: str, find: Find) -> web.Response:
        bare = re.sub(r"^(chatcmpl-|cmpl-|resp_|msg_)", "", request_id)
        found = await find(request_id) or await find(bare)
        if found is None:
            raise ApiError(
                404,
                f"request {request_id[:200]} is unknown on this node: wrong id, or it finished long ago",
            )
        return json_response(found)

    async def live(self, request: web.Request) -> web.Response:
        return json_response(await self._frontend.live())

    async def live_history(self, request: web.Request) -> web.Response:
        """?after=N: only intervals with a number above N."""
        after = request.query.get("after", "0")
        if not re.fullmatch(r"[0-9]{1,18}", after):
            raise ApiError(400, "after must be the number of an interval of an earlier answer", param="after")
        return json_response(await self._frontend.live_history(int(after)))

    async def live_request(self, request: web.Request) -> web.Response:
        """Like /debug/requests/<id>, but for requests that any node accepted."""
        return await self._timeline(request.match_info["request_id"], self._frontend.find_timeline)

    async def cluster(self, request: web.Request) -> web.Response:
        """Sealed if the asker proves the cluster key (net/http/common/joining.py)."""
        question = joining(request, self._cluster_key)
        if question is None:
            return json_response(self._frontend.cluster())
        body = question.seal(orjson.dumps(self._frontend.cluster()), os.urandom(IV_BYTES))
        return web.Response(body=body, content_type=SEALED_TYPE)

    def _model(self) -> dict[str, Any]:
        frontend = self._frontend
        return {
            "id": frontend.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "mooncake",
            "root": frontend.model_root,
            "parent": None,
            "max_model_len": frontend.max_model_len,
            "weights_version": frontend.weights()["version"] or None,
        }
