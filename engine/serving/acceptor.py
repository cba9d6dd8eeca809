"""The acceptor: the node that took a client's request owns it until the last token.

It tokenises, places, starts the request on its prefill and decode nodes, and keeps every token it has passed on. When
one of those nodes fails, it places the request again with prompt + tokens so far; most of their KV is found in the
pool, and a draw depends only on (seed, position), so the client sees a pause and then the same stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from cache.block import BlockKey, salted_root
from engine.request import SamplingParams
from engine.serving.attempts import CLOSING_REASON, AttemptFailed, Attempts, Redirected
from engine.serving.flight import Flight, OutputText, drawn_seed
from engine.serving.flight_log import FlightLog
from engine.serving.otlp import SpanExport
from engine.serving.placing import Placer
from engine.serving.recent import Recent
from engine.serving.silence import Silent
from engine.serving.timeline import Timeline
from engine.serving.trace_recorder import TraceRecorder
from engine.text.tokenizer import Tokenizer
from net.channel import Channel, PeerLost
from net.http.frontend import Output, Overloaded, Unavailable
from net.metrics import Metrics

log = logging.getLogger("mooncake.acceptor")

MAX_ATTEMPTS = 4
RESUME_PATIENCE_S = 30.0
RESUME_RETRY_S = 0.25
DRAIN_POLL_S = 0.02


class Acceptor:
    """Turns prompts into token streams over the cluster."""

    def __init__(
        self,
        node_id: str,
        channel: Channel,
        placer: Placer,
        tokenizer: Tokenizer,
        root: BlockKey,
        max_model_len: int,
        timeout_s: float,
        metrics: Metrics,
        recorder: TraceRecorder | None = None,
        export: SpanExport | None = None,
    ) -> None:
        self._node_id = node_id
        self._tokenizer = tokenizer
        self._root = root
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._log = FlightLog(node_id, metrics, placer, recorder, export)
        self._attempts = Attempts(channel, placer, self._log)
        self.node_suspected = self._attempts.node_suspected
        self._closing = False

    # --- a request, from prompt to last token

    async def generate(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        request_id: str,
        service_class: str,
        cache_salt: str,
        again: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """Stream the answer; `again`: see Frontend.generate. Raises ValueError, Overloaded or Unavailable before the
        first output; closing the iterator aborts the request on every node."""
        if self._closing:
            raise Unavailable(CLOSING_REASON, retry_after_s=1.0)
        flight = self._accept(prompt, sampling, request_id, service_class, cache_salt)
        self._log.accepted(flight)
        reason = None
        try:
            if again:
                await self._attempts.adopt(flight)
            async for output in self._outputs(flight):
                reason = output.finish_reason
                yield output
        except (Overloaded, Unavailable) as error:
            self._log.rejected(error)
            raise
        finally:
            self._attempts.abort(flight)
            self._log.over(flight, reason)

    def _accept(
        self, prompt: list[int], sampling: dict[str, Any], request_id: str, service_class: str, cache_salt: str
    ) -> Flight:
        params = SamplingParams(**sampling)
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with at least one to generate it exceeds the context of "
                f"{self._max_model_len} tokens"
            )
        seed = drawn_seed(request_id, prompt) if params.seed is None else params.seed
        limit = min(params.max_tokens, room)
        params = replace(params, seed=seed, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
        timeline = Timeline(request_id, len(prompt))
        timeline.nodes["acceptor"] = self._node_id
        return Flight(
            request_id,
            list(prompt),
            len(prompt),
            params,
            service_class,
            salted_root(self._root, cache_salt),
            timeline,
            deadline=time.monotonic() + self._timeout_s,
            accepted=time.monotonic(),
        )

    async def _outputs(self, flight: Flight) -> AsyncGenerator[Output, None]:
        text = OutputText(self._tokenizer, flight)
        while True:
            try:
                if flight.adopted is None:
                    await self._start_or_wait(flight)
                async for output in self._attempts.outputs(flight, text):
                    yield output
                    if output.finish_reason is not None:
                        return
            except Redirected as reason:
                self._log.redirected(flight, str(reason))
                self._attempts.abort(flight)
                flight.avoid.add(flight.timeline.nodes["prefill"])
                flight.attempt += 1
                flight.redirects += 1
            except (AttemptFailed, PeerLost, Silent) as error:
                self._give_up_attempt(flight, str(error))

    def _give_up_attempt(self, flight: Flight, reason: str) -> None:
        """Abort what is left of this attempt and make ready for the next one. Raises Unavailable after the last."""
        log.warning("request %s, attempt %d: %s", flight.request_id, flight.attempt, reason)
        self._log.attempt_failed(flight, reason)
        self._attempts.abort(flight)
        flight.adopted = None
        flight.attempt += 1
        if flight.attempt - flight.redirects >= MAX_ATTEMPTS:
            raise Unavailable(f"the request failed on {MAX_ATTEMPTS} placements, last: {reason}", retry_after_s=1.0)
        self._log.resumed()

    async def _start_or_wait(self, flight: Flight) -> None:
        """Start an attempt. A new request that finds no room is refused at once; one that already runs waits for it:
        its client has been promised an answer."""
        patience = time.monotonic() + RESUME_PATIENCE_S
        while True:
            try:
                return await self._attempts.start(flight)
            except (Overloaded, Unavailable):
                self._attempts.abort(flight)
                new = flight.attempt == flight.redirects
                if new or self._closing or time.monotonic() > min(patience, flight.deadline):
                    raise
                await asyncio.sleep(RESUME_RETRY_S)

    # --- ends

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more, and wait for what was accepted. What is left after the timeout, or when this is
        cancelled, fails."""
        self._closing = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._attempts:  # noqa: ASYNC110 - once in a node's life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("%d requests are not finished after %g s and fail", len(self._attempts), timeout_s)
        finally:
            self._attempts.fail_all()

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """JSON-ready; None for a request that is not known, or not any more."""
        return self._log.timeline(request_id)

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._attempts)

    @property
    def recent(self) -> Recent:
        """The requests that ended here last."""
        return self._log.recent
