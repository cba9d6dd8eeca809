"""The acceptor: the node that took a client's request owns it until the last token.

It tokenises, places, starts the request on its prefill and decode nodes, and keeps every token it has passed on. When
one of those nodes fails, it places the request again with prompt + tokens so far; most of their KV is found in the
pool, and a draw depends only on (seed, position), so the client sees a pause and then the same stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cache.block import BlockKey
from cache.keys import salted_root
from engine.front.attempts import CLOSING_REASON, AttemptFailed, NodeUnreachable, Redirected
from engine.front.declined import NO_NODE_RETRY_S, NotPlaced
from engine.front.flight import Flight, OutputText, drawn_seed
from engine.front.flight_log import FlightLog
from engine.front.gate import Gate
from engine.front.persistence import MAX_FUTILE_ATTEMPTS, Persistence
from engine.front.sessions.turns import Sessions, session_number
from engine.observe.recent import Recent
from engine.observe.timeline import Timeline
from engine.sampling.params import SamplingParams
from engine.text.tokenizer import Tokenizer
from net.channel.channel import PeerLost
from net.http.common.frontend import Choices, Output, Overloaded, Unavailable

log = logging.getLogger("mooncake.acceptor")

DRAIN_POLL_S = 0.02
REPLACED_REASON = "the model's weights were replaced since this answer began: send the request again as a new one"
PLACE_RETRY_INTERVAL_S = 2.0
"""A request that waits for a missing role tries placement at this interval even if gossip shows no node with the role:
placement also asks nodes of other cells and nodes without a load record."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that apply to every request."""

    max_model_len: int  # tokens, prompt and output
    timeout_s: float  # from acceptance to the last token
    role_wait_s: float  # how long a new request waits for a role that no node has
    site_bound: frozenset[str] = frozenset()  # tenants, by their cache_salt, whose requests stay at this site


class Nodes(Protocol):
    """Where requests can go: the nodes of the cluster (engine/front/placing.py), or workers of others
    (engine/backends/placing.py)."""

    def room(self) -> tuple[int, float]:
        """(requests that may wait for their first token, Retry-After in seconds if that number waits)"""

    def missing_role(self) -> str:
        """A role that none has; '' if every role is there."""


class Tries(Protocol):
    """The attempts of this acceptor's requests (engine/front/attempts.py, engine/backends/attempts.py)."""

    async def adopt(self, flight: Flight) -> bool:
        """Continue an attempt whose acceptor was lost. Returns False if there is none."""

    async def start(self, flight: Flight) -> None:
        """Place the request and begin it. Raises NotPlaced, Overloaded, Unavailable, AttemptFailed, NodeUnreachable or
        Redirected."""

    async def output(self, flight: Flight, text: OutputText) -> Output:
        """The next output. Raises AttemptFailed, Overloaded or Unavailable."""

    def abort(self, flight: Flight) -> None:
        """End the flight's attempt everywhere."""

    def fail_all(self) -> None:
        """This node shuts down: every client gets an error."""


class Acceptor:
    """Turns prompts into token streams over the cluster."""

    sessions: Sessions | None = None
    """Parks the KV of sessions between their turns, if that is wanted."""

    def __init__(
        self,
        node_id: str,
        placer: Nodes,
        attempts: Tries,
        tokenizer: Tokenizer,
        root: BlockKey,
        limits: RequestLimits,
        log: FlightLog,
    ) -> None:
        self._node_id = node_id
        self._tokenizer = tokenizer
        self._root = root
        self._limits = limits
        self._log = log
        self._placer = placer
        self._attempts = attempts
        self._flights: set[Flight] = set()  # unfinished
        self._weights, self._renewed = b"", -math.inf  # of new requests; when they were replaced, monotonic seconds
        self._closing = self._over = False
        self._gate = Gate(placer.room)

    def check_room(self, arriving: int) -> None:
        """See Frontend.check_room."""
        try:
            self._gate.check(arriving)
        except Overloaded as error:
            self._log.turned_away(error)
            raise

    # --- a request, from prompt to last token

    async def generate(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        request_id: str,
        service_class: str,
        cache_salt: str,
        again: bool = False,
        session: str = "",
        choices: Choices | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Stream the answer; `again`, `session`, `choices`: see Frontend.generate. Raises ValueError, Overloaded or
        Unavailable before the first output; closing the iterator aborts the request on every node."""
        choices = choices or Choices()
        if self._closing and not choices.begun:
            raise Unavailable(CLOSING_REASON, retry_after_s=1.0)
        flight = self._accept(prompt, sampling, request_id, service_class, cache_salt, choices)
        flight.resumed = again
        if session and self.sessions is not None:
            flight.session = session_number(flight.root, session)
            self.sessions.begun(flight)
        self._flights.add(flight)
        self._log.accepted(flight)
        text = OutputText(self._tokenizer, flight)
        reason: str | None = None
        try:
            if not again:
                await self._gate.enter(flight, choices, flight.deadline - time.monotonic())
            elif not await self._adopt(flight) and self._may_have_begun_on_others():
                raise Unavailable(REPLACED_REASON, retry_after_s=1.0)
            while reason is None:
                output = await self._output(flight, text)
                self._gate.leave(flight)
                reason = output.finish_reason
                yield output
        except (Overloaded, Unavailable) as error:
            self._log.rejected(flight, error)
            raise
        finally:
            self._flights.discard(flight)
            self._gate.leave(flight)
            self._attempts.abort(flight)
            self._log.over(flight, reason)
            if self.sessions is not None:
                self.sessions.over(flight, answered=reason is not None)

    def _accept(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        request_id: str,
        service_class: str,
        cache_salt: str,
        choices: Choices,
    ) -> Flight:
        params = SamplingParams(**sampling)
        room = self._limits.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with at least one to generate it exceeds the context of "
                f"{self._limits.max_model_len} tokens"
            )
        seed = drawn_seed(request_id, prompt) if params.seed is None else params.seed
        limit = min(params.max_tokens, room)
        params = replace(params, seed=seed, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
        timeout_s = self._limits.timeout_s
        timeline, now = Timeline(request_id, len(prompt)), time.monotonic()
        timeline.nodes["acceptor"] = self._node_id
        return Flight(
            request_id,
            list(prompt),
            len(prompt),
            params,
            service_class,
            salted_root(self._root, cache_salt),
            timeline,
            deadline=now + timeout_s,
            accepted=now,
            persistence=Persistence(now, now + timeout_s, self._limits.role_wait_s, choices),
            weights=self._weights,
            site_bound=cache_salt in self._limits.site_bound,
        )

    # --- weights

    def renew(self, weights: bytes) -> None:
        """The cluster serves other weights: requests without a token begin with them, others end with theirs."""
        if weights != self._weights:
            self._weights, self._renewed = weights, time.monotonic()

    def open_by_weights(self) -> Counter[bytes]:
        """Number of unfinished requests, by the weights that compute them."""
        return Counter(flight.weights for flight in self._flights)

    def _may_have_begun_on_others(self) -> bool:
        """Whether a client that continues an answer may have tokens of weights that were replaced since."""
        return time.monotonic() - self._renewed < self._limits.timeout_s

    async def _output(self, flight: Flight, text: OutputText) -> Output:
        """The next output. If an attempt ends without one, the acceptor starts the next attempt."""
        while True:
            try:
                if not flight.runs and not await self._start_or_wait(flight):
                    self._log.timed_out(flight)
                    return text.end("abort")
                return await self._attempts.output(flight, text)
            except Redirected as reason:
                self._log.redirected(flight, str(reason))
                self._attempts.abort(flight)
                flight.avoid.add(flight.timeline.nodes["prefill"])
                flight.attempt += 1
                flight.redirects += 1
            except (AttemptFailed, PeerLost) as error:
                self._give_up_attempt(flight, str(error))

    def _give_up_attempt(self, flight: Flight, reason: str) -> None:
        """Abort this attempt and prepare the next one. Raises Unavailable if there have been too many."""
        log.warning("request %s, attempt %d: %s", flight.request_id, flight.attempt, reason)
        self._log.attempt_failed(flight, reason)
        self._attempts.abort(flight)
        _avoid_what_failed(flight)
        flight.adopted = None
        flight.attempt += 1
        flight.failed_apart += flight.apart and flight.last_token < flight.begun
        if not flight.persistence.failed(flight.num_output_tokens):
            raise Unavailable(
                f"{MAX_FUTILE_ATTEMPTS} attempts in a row brought no token, last: {reason}", retry_after_s=1.0
            )
        self._log.resumed()

    async def _start_or_wait(self, flight: Flight) -> bool:
        """Start an attempt. A new request is refused at once if all nodes are full, and waits up to `role_wait_s` for a
        missing role. A request that has begun, with any of its choices, waits for both until its deadline, because its
        client was promised an answer. Returns False if the deadline passes and the client has a part of the answer."""
        while True:
            if not flight.num_output_tokens and not flight.resumed:
                flight.weights = self._weights
            try:
                await self._start(flight)
            except (NotPlaced, Overloaded, Unavailable, NodeUnreachable) as error:
                self._attempts.abort(flight)
                _avoid_what_failed(flight)
                flight.attempt += 1
                if not await self._wait(flight, error):
                    if self._over:
                        raise Unavailable(CLOSING_REASON, retry_after_s=1.0) from None
                    if flight.num_output_tokens:
                        return False
                    if isinstance(error, NotPlaced):
                        self._log.declined(flight, error.declined)
                    raise _answer(error) from None
            else:
                return True

    async def _start(self, flight: Flight) -> None:
        """See Tries.start."""
        choices, first = flight.persistence.choices, not flight.attempt
        self._check_not_over()
        choices.trying += first
        try:
            await self._attempts.start(flight)
        finally:
            choices.trying -= first
        self._check_not_over()

    async def _adopt(self, flight: Flight) -> bool:
        """See Tries.adopt."""
        adopted = await self._attempts.adopt(flight)
        self._check_not_over()
        return adopted

    def _check_not_over(self) -> None:
        """Raises Unavailable. `fail_all` reaches no attempt that begins after it."""
        if self._over:
            raise Unavailable(CLOSING_REASON, retry_after_s=1.0)

    async def _wait(self, flight: Flight, error: Exception) -> bool:
        """Wait until the next try. Returns False if there is none."""
        waits = flight.persistence.waits
        absent = isinstance(error, NodeUnreachable) or (isinstance(error, NotPlaced) and bool(error.missing_role))
        if not (waits or absent) or (self._closing and not waits):
            return False
        self._log.waits(flight, str(error))
        begun = time.monotonic()
        while not self._over and (pause_s := flight.persistence.pause_s(time.monotonic())) is not None:
            await asyncio.sleep(pause_s)
            if not self._placer.missing_role() or time.monotonic() - begun > PLACE_RETRY_INTERVAL_S:
                return not self._over
        return False

    # --- ends

    async def drain(self, timeout_s: float) -> None:
        """Accept no more requests and wait for the accepted ones. Requests that are open after `timeout_s`, or when
        this is cancelled, fail."""
        self._closing = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.open:  # noqa: ASYNC110 - once in a node's life
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("%d requests did not finish within %g s and fail", self.open, timeout_s)
        finally:
            self._over = True
            self._attempts.fail_all()

    def timeline(self, request_id: str) -> dict[str, Any] | None:
        """Of the newest request with this id, JSON-ready; None if the id is unknown or its timeline was dropped."""
        return self._log.timeline(request_id)

    @property
    def open(self) -> int:
        """Number of unfinished requests, also of those that are being placed or adopted."""
        return len(self._flights)

    @property
    def recent(self) -> Recent:
        """The requests that ended here most recently."""
        return self._log.recent


def _avoid_what_failed(flight: Flight) -> None:
    """The same node would promise the earliest first token again, and may fail again: its tier is full, or its disk
    fails."""
    if flight.beyond:
        flight.avoid.update(flight.prefills)


def _answer(error: Exception) -> Exception:
    """The API's answer to a request that no node takes."""
    if isinstance(error, NotPlaced):
        return error.answer()
    return Unavailable(str(error), NO_NODE_RETRY_S) if isinstance(error, NodeUnreachable) else error
