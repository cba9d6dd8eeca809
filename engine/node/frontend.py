"""The Frontend of this node's HTTP API: the tokenizer, the acceptor and the state of the node.

Implements net.http.common.frontend.Frontend, the only part of the engine that the HTTP layer knows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.config.config import NO_MODEL
from engine.front.acceptor import Acceptor
from engine.node.leaving import Leaving
from engine.node.prefix_reset import PrefixReset
from engine.node.weights import NodeWeights
from engine.observe.live import Live
from engine.text.tokenizer import Tokenizer
from net.http.common.frontend import Choices, Output, Unavailable

NO_TOKENS = "this node is a store without a model (--model none): ask a node that serves one"


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers about this node. `healthy`: why it is not ready; None if it is. `masked_ranks`: why, by rank."""

    cluster: Callable[[], dict[str, Any]]
    state: Callable[[], dict[str, Any]]
    healthy: Callable[[], str | None]
    masked_ranks: Callable[[], Mapping[str, str]]
    metrics: Callable[[], Awaitable[bytes]]
    live: Live
    leaving: Leaving
    reset: PrefixReset
    weights: NodeWeights


@dataclass(frozen=True, slots=True)
class Served:
    """The model, as clients see it."""

    name: str
    root: str  # path or id from which it was loaded
    max_model_len: int
    max_answer_logprobs: int
    trusts_chat_templates: bool


class Compiler(Protocol):
    """Of structured output (engine/sampling/grammar.py, engine/backends/question.py)."""

    def compile(self, kind: str, source: str) -> str:
        """The text for SamplingParams.grammar. Raises ValueError."""


class ServingFrontend:
    """Text in, text out, and questions about this node."""

    def __init__(
        self, served: Served, tokenizer: Tokenizer, grammars: Compiler, acceptor: Acceptor, answers: Answers
    ) -> None:
        self._show(served, tokenizer.vocab_size)
        self._answer(answers)
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._acceptor = acceptor

    def _show(self, served: Served, vocab_size: int) -> None:
        self.model_name, self.model_root = served.name, served.root
        self.max_model_len, self.max_answer_logprobs = served.max_model_len, served.max_answer_logprobs
        self.trusts_chat_templates = served.trusts_chat_templates
        self.vocab_size = vocab_size

    def _answer(self, answers: Answers) -> None:
        self.cluster, self.state, self.healthy = answers.cluster, answers.state, answers.healthy
        self.masked_ranks = answers.masked_ranks
        self._metrics, self._live, self._leaving = answers.metrics, answers.live, answers.leaving
        self._reset, self._weights = answers.reset, answers.weights
        self.weights = answers.weights.state

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return self._tokenizer.chat(messages, **kwargs)

    def compile_grammar(self, kind: str, source: str) -> str:
        return self._grammars.compile(kind, source)

    def tokenizer_info(self) -> dict[str, Any]:
        return {"eos_token": None, "bos_token": None} | self._tokenizer.info | {"model_max_length": self.max_model_len}

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_str(token_id)

    def check_room(self, arriving: int) -> None:
        self._acceptor.check_room(arriving)

    def generate(
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
        return self._acceptor.generate(prompt, sampling, request_id, service_class, cache_salt, again, session, choices)

    async def metrics(self) -> bytes:
        return await self._metrics()

    async def live(self) -> dict[str, Any]:
        return await self._live.cluster()

    async def live_history(self, after: int) -> dict[str, Any]:
        return await self._live.history(after)

    def drain(self, timeout_s: float | None, grace_s: float, force: bool) -> dict[str, Any]:
        self._leaving.ask(timeout_s, grace_s, force)
        return self._leaving.progress()

    def draining(self) -> dict[str, Any]:
        return self._leaving.progress()

    async def reset_prefix_cache(self) -> dict[str, dict[str, Any]]:
        return await self._reset.cluster()

    async def update_weights(self, prefix: str, version: str, tenant: str, timeout_s: float) -> dict[str, Any]:
        return await self._weights.update(prefix, version, tenant, timeout_s)

    async def find_timeline(self, request_id: str) -> dict[str, Any] | None:
        return await self._live.timeline(request_id)

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return self._acceptor.timeline(request_id)


class StoreFrontend(ServingFrontend):
    """A node without a model: it answers questions about itself, and refuses requests for tokens with 503."""

    def __init__(self, answers: Answers) -> None:
        self._show(Served(NO_MODEL, NO_MODEL, 0, 0, False), vocab_size=0)
        self._answer(answers)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise Unavailable(NO_TOKENS, retry_after_s=60.0)

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        raise Unavailable(NO_TOKENS, retry_after_s=60.0)

    def check_room(self, arriving: int) -> None:
        raise Unavailable(NO_TOKENS, retry_after_s=60.0)

    def compile_grammar(self, kind: str, source: str) -> str:
        raise Unavailable(NO_TOKENS, retry_after_s=60.0)

    def tokenizer_info(self) -> dict[str, Any]:
        raise Unavailable(NO_TOKENS, retry_after_s=60.0)

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        return None
