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
from engine.request import Request, SamplingParams
from engine.serving import messages
from engine.serving.adoption import Adoption
from engine.serving.flight import Flight, OutputText, drawn_seed
from engine.serving.flight_log import FlightLog
from engine.serving.messages import pack_request, unpack_logprobs
from engine.serving.otlp import SpanExport
from engine.serving.placing import Placer
from engine.serving.recent import Recent
from engine.serving.silence import Silence, Silent
from engine.serving.timeline import Timeline
from engine.serving.trace_recorder import TraceRecorder
from engine.text.tokenizer import Tokenizer
from net.channel import Channel, PeerLost, RemoteError
from net.http.frontend import Output, Overloaded, Unavailable
from net.metrics import Metrics

log = logging.getLogger("mooncake.acceptor")

MAX_ATTEMPTS = 4
MAX_REDIRECTS = 2
RESUME_PATIENCE_S = 30.0
RESUME_RETRY_S = 0.25
TIMED_OUT = [-1, None, None, "timed_out", None]
"""Comes among a flight's items at its deadline: one timer instead of one for every token."""

CLOSING = [-1, None, None, "closing", None]
"""Comes among them when this node goes before the request ends."""

CLOSING_REASON = "this node is shutting down"
DRAIN_POLL_S = 0.02


class AttemptFailed(Exception):
    """A node of this attempt failed; the request can be placed again."""


class Redirected(Exception):
    """The prefill node has become too busy; nothing failed."""


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
        self._channel = channel
        self._placer = placer
        self._tokenizer = tokenizer
        self._root = root
        self._max_model_len = max_model_len
        self._timeout_s = timeout_s
        self._log = FlightLog(node_id, metrics, placer, recorder, export)
        self._flights: dict[str, Flight] = {}  # by attempt id
        self._closing = False
        self._adoption = Adoption(channel)
        self._silence = Silence(channel, placer.suspects, self._flights.values, _fail)
        self.node_suspected = self._silence.suspected
        channel.handle(messages.TOKENS, self._on_tokens)
        channel.on_lost(self.node_lost)
        channel.on_closed(self.node_lost)

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
            if again and await self._adoption.adopt(flight, self._placer.decode_nodes()):
                self._flights[flight.attempt_id] = flight
                self._log.adopted(flight)
            async for output in self._outputs(flight):
                reason = output.finish_reason
                yield output
        except (Overloaded, Unavailable) as error:
            self._log.rejected(error)
            raise
        finally:
            self._abort_attempt(flight)
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
                async for output in self._attempt(flight, text):
                    yield output
                    if output.finish_reason is not None:
                        return
            except Redirected as reason:
                self._log.redirected(flight, str(reason))
                self._abort_attempt(flight)
                flight.avoid.add(flight.timeline.nodes["prefill"])
                flight.attempt += 1
                flight.redirects += 1
            except (AttemptFailed, PeerLost, Silent) as error:
                self._give_up_attempt(flight, str(error))

    def _give_up_attempt(self, flight: Flight, reason: str) -> None:
        """Abort what is left of this attempt and make ready for the next one. Raises Unavailable after the last."""
        log.warning("request %s, attempt %d: %s", flight.request_id, flight.attempt, reason)
        self._log.attempt_failed(flight, reason)
        self._abort_attempt(flight)
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
                return await self._start(flight)
            except (Overloaded, Unavailable):
                self._abort_attempt(flight)
                new = flight.attempt == flight.redirects
                if new or self._closing or time.monotonic() > min(patience, flight.deadline):
                    raise
                await asyncio.sleep(RESUME_RETRY_S)

    async def _start(self, flight: Flight) -> None:
        """Place the request and start it: blocks on the decode node first, then the prefill that fills them."""
        request = Request(
            request_id=flight.attempt_id,
            token_ids=flight.token_ids,
            num_prompt_tokens=flight.num_prompt_tokens,
            sampling=flight.sampling,
            arrival=flight.accepted,
            root=flight.root,
            service_class=flight.service_class,
        )
        placed = await self._placer.place(request, flight.avoid, new=flight.attempt == flight.redirects)
        placement = placed.placement
        self._log.placed(flight, placed)
        self._flights[flight.attempt_id] = flight
        flight.items = asyncio.Queue()
        flight.nodes = {placement.prefill, placement.decode}
        flight.watched = set(flight.nodes)
        body, data = pack_request(request, time.monotonic() - flight.accepted)
        left = max(1.0, flight.deadline - time.monotonic())
        target = None
        promise = placed.promise(MAX_REDIRECTS - flight.redirects)
        try:
            if placement.decode != placement.prefill:
                reserve = body | {"prefill_node": placement.prefill}
                reply = await self._silence.ask(flight, placement.decode, messages.RESERVE, reserve, data, left)
                target = {
                    "node": placement.decode,
                    "region": reply["region"],
                    "block_ids": reply["blocks"],
                    "first_missing": reply["first_missing"],
                }
                self._log.reserved(flight, placement.decode)
            body |= {"target": target, "promise": promise}
            await self._silence.ask(flight, placement.prefill, messages.PREFILL, body, data, left)
        except RemoteError as error:
            if error.code == "redirect":
                raise Redirected(str(error)) from None
            await self._placer.release(placed)
            if error.code == "overloaded":
                raise Overloaded(str(error), retry_after_s=1.0) from None
            raise AttemptFailed(str(error)) from None
        except TimeoutError:
            raise Unavailable("the request waited for KV blocks until its deadline", retry_after_s=5.0) from None

    async def _attempt(self, flight: Flight, text: OutputText) -> AsyncGenerator[Output, None]:
        """Outputs until the end or AttemptFailed."""
        timer = asyncio.get_running_loop().call_later(self._left(flight), flight.items.put_nowait, TIMED_OUT)
        try:
            while True:
                index, token, logprobs, finish, extra = await flight.items.get()
                if extra:
                    self._log.told(flight, extra)
                if finish == "timed_out":
                    self._log.timed_out(flight)
                    yield text.end("abort")
                    return
                if finish == "closing":
                    raise Unavailable(CLOSING_REASON, retry_after_s=1.0)
                if finish == "refused":  # by its decode node: --rejection stage-load
                    raise Overloaded(extra["error"], retry_after_s=1.0)
                if finish == "failed":
                    raise AttemptFailed(extra["error"] if extra else "a node failed")
                if finish == "handed_over":
                    flight.watched.discard(flight.timeline.nodes["prefill"])
                    continue
                if 0 <= index < flight.num_output_tokens:
                    continue  # an adopted request's newest tokens can come twice
                if index != flight.num_output_tokens:  # a late item of an earlier attempt cannot come here: ids differ
                    raise AttemptFailed(f"token {index} arrived where {flight.num_output_tokens} was due")
                self._log.token(flight)
                flight.token_ids.append(token)
                output = text.push(token, unpack_logprobs(logprobs), finish)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            timer.cancel()

    def _left(self, flight: Flight) -> float:
        return max(0.0, flight.deadline - time.monotonic())

    # --- messages and losses

    async def _on_tokens(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        for attempt_id, *item in body["items"]:
            flight = self._flights.get(attempt_id)
            if flight is None:
                self._adoption.keep(attempt_id, item)
            else:
                flight.items.put_nowait(item)
                if item[3] is not None:  # ended there, nothing to abort
                    flight.nodes.discard(peer)

    def node_lost(self, node: str) -> None:
        """Fail the attempts that need `node`."""
        for flight in self._flights.values():
            if node in flight.watched:
                _fail(flight, f"node {node} was lost")

    # --- ends

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more, and wait for what was accepted. What is left after the timeout, or when this is
        cancelled, fails."""
        self._closing = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._flights:  # noqa: ASYNC110 - once in a node's life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("%d requests are not finished after %g s and fail", len(self._flights), timeout_s)
        finally:
            for flight in self._flights.values():
                flight.items.put_nowait(CLOSING)

    def _abort_attempt(self, flight: Flight) -> None:
        if self._flights.pop(flight.attempt_id, None) is not None:
            for node in flight.nodes:
                # a lost node cannot be told and need not be: losing us ends the request there
                self._channel.post(node, messages.ABORT, {"ids": [flight.attempt_id]})

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """JSON-ready; None for a request that is not known, or not any more."""
        return self._log.timeline(request_id)

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    @property
    def recent(self) -> Recent:
        """The requests that ended here last."""
        return self._log.recent

    @property
    def num_flights(self) -> int:
        return len(self._flights)


def _fail(flight: Flight, reason: str) -> None:
    """End its attempt, behind what has arrived."""
    flight.items.put_nowait([-1, None, None, "failed", {"events": [], "cached_tokens": 0, "error": reason}])
