"""A deterministic frontend without a model: it echoes the prompt's bytes, one token per byte.

Prompts that start with one of the words in `generate` make it fail in a known way.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from net.http import HttpServer, LogprobItem, Output, Overloaded, Unavailable, create_app
from net.http.common.frontend import Choices, Refused
from net.http.common.keys import ApiKeys


class FakeFrontend:
    """Ids 0..255 are bytes, 256 is a special token. Remembers its calls and which requests are open."""

    model_name = "fake"
    model_root = "fake/root"
    max_model_len = 2000
    vocab_size = 257
    max_answer_logprobs = 20_000
    trusts_chat_templates = False

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.calls: list[dict[str, Any]] = []
        self.rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []  # messages and template arguments
        self.open: list[str] = []  # a client may use an id for several
        self.started = asyncio.Event()
        self.idle = asyncio.Event()
        self.last = False  # of its role
        self.drained: tuple[float | None, float] | None = None
        self.sick: str | None = None
        self.masked: dict[str, str] = {}  # ranks with experts
        self.resets = 0
        self.version = ""  # of the weights
        self.update_error: Exception | None = None
        self.places = 10_000  # requests that may be open
        self.produced = 0  # outputs taken by the HTTP layer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        if any(message["role"] == "nobody" for message in messages):
            raise ValueError("the chat template refused the messages: it knows no role 'nobody'")
        self.rendered.append((messages, kwargs))
        return self.encode("".join(message.get("content") or "" for message in messages))

    def compile_grammar(self, kind: str, source: str) -> str:
        if "!bad" in source:
            raise ValueError(f"cannot compile the {kind}: !bad")
        return f"{kind} {source}"

    def check_room(self, arriving: int) -> None:
        if arriving + len(self.open) >= self.places:
            raise Overloaded("all places are taken", 1.2)

    def tokenizer_info(self) -> dict[str, Any]:
        return {"eos_token": "<special>", "chat_template": None}

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<special>"

    async def generate(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        *,
        request_id: str,
        service_class: str,
        cache_salt: str,
        again: bool = False,
        session: str = "",
        choices: Choices | None = None,
    ) -> AsyncGenerator[Output, None]:
        call = {"prompt": prompt, "sampling": sampling, "request_id": request_id, "again": again}
        self.calls.append(call | {"service_class": service_class, "cache_salt": cache_salt, "session": session})
        self.open.append(request_id)
        self.started.set()
        self.idle.clear()
        try:
            async for output in self._generate(prompt, sampling):
                yield output
                self.produced += 1
        finally:
            self.open.remove(request_id)
            if not self.open:
                self.idle.set()

    async def stalled(self) -> bool:
        """Has nobody taken an output for a while?"""
        before = self.produced
        await asyncio.sleep(0.2)
        return self.produced == before

    async def _generate(self, prompt: list[int], sampling: dict[str, Any]) -> AsyncGenerator[Output, None]:
        word, _, rest = self.decode(prompt).partition(" ")
        match word:
            case "!overloaded":
                raise Overloaded("the queue is full", 1.2)
            case "!unavailable":
                raise Unavailable("no decode node is alive", 3)
            case "!invalid":
                raise ValueError("top_p must be in (0, 1], got 2")
            case "!crash":
                raise RuntimeError("secret of the inside")
            case "!hang":
                await asyncio.Event().wait()
        cached = len(prompt) // 2
        stops = sampling["stop"]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        sent = ""
        for position in range(sampling["max_tokens"]):
            await asyncio.sleep(self.delay_s)
            if position == 2 and word == "!late":
                raise Unavailable("the decode node died", 1) if rest == "death" else RuntimeError("late secret")
            if position == 2 and word == "!hang-later":
                await asyncio.Event().wait()
            if position == 2 and word == "!silent-end":
                return
            token = prompt[position % len(prompt)]
            text = decoder.decode(self.token_bytes(token))
            sent += text
            stop = next((s for s in stops if s in sent), None)
            reason = "stop" if stop else "length" if position + 1 == sampling["max_tokens"] else None
            logprobs = None
            if sampling["logprobs"] is not None:
                logprobs = [LogprobItem(token, -0.5, [(token, -0.5), (65, -1.5), (66, float("-inf"))])]
            of_prompt = None
            if position == 0 and sampling.get("prompt_logprobs") is not None:
                best = [[(65, -0.25), (t, -float(i))] for i, t in enumerate(prompt)]
                of_prompt = [LogprobItem(t, -float(i), best[i], rank=7) for i, t in enumerate(prompt)][1:]
            yield Output(text, [token], logprobs, reason, len(prompt), cached, stop, of_prompt)
            if reason:
                return

    async def live(self) -> dict[str, Any]:
        return {"node_id": "fake", "nodes": []}

    async def live_history(self, after: int) -> dict[str, Any]:
        return {
            "unix_s": 1e9,
            "interval_s": 5.0,
            "kept": 180,
            "silent": [],
            "intervals": [],
            "marks": [],
            "after": after,
        }

    async def find_timeline(self, request_id: str) -> dict[str, Any] | None:
        return self.timeline(request_id)

    def cluster(self) -> dict[str, Any]:
        return {"members": []}

    def state(self) -> dict[str, Any]:
        return {"running": len(self.open)}

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id} if request_id in {call["request_id"] for call in self.calls} else None

    def drain(self, timeout_s: float | None, grace_s: float, force: bool) -> dict[str, Any]:
        if self.last and not force:
            raise Refused("no other node of the cluster has role decode")
        self.drained = (timeout_s, grace_s)
        return self.draining()

    def draining(self) -> dict[str, Any]:
        return {"draining": self.drained is not None}

    async def reset_prefix_cache(self) -> dict[str, dict[str, Any]]:
        self.resets += 1
        return {"fake": {"arena_blocks": 3, "pooled_blocks": 2, "error": self.sick}}

    async def update_weights(self, prefix: str, version: str, tenant: str, timeout_s: float) -> dict[str, Any]:
        if self.update_error is not None:
            raise self.update_error
        self.version = version
        return {"version": version, "prefix": prefix, "tenant": tenant, "timeout_s": timeout_s}

    def weights(self) -> dict[str, Any]:
        told = {"generation": 0, "key": "", "prefix": "", "tenant": "", "version": self.version, "root": "ab"}
        return told | {"updating": False, "behind": None, "held": [""]}

    def masked_ranks(self) -> dict[str, str]:
        return self.masked

    def healthy(self) -> str | None:
        return self.sick

    async def metrics(self) -> bytes:
        return b"# fake\n"


@asynccontextmanager
async def serving(frontend: FakeFrontend, api_key: str | None = None, **options: Any) -> AsyncIterator[str]:
    """The frontend behind a real server on a free port; yields its base URL."""
    options = {"keys": ApiKeys(api_key)} | options
    server = HttpServer(create_app(frontend, **options), shutdown_timeout_s=0.1)
    host, port = await server.start("127.0.0.1")
    try:
        yield f"http://{host}:{port}"
    finally:
        await server.close()
