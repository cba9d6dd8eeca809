"""The attempts of accepted requests: where each runs, what its nodes tell of it, and its end on all of them.

An attempt is one placement of a request. It has an id of its own on the engine nodes, so that what an earlier one
still says cannot be taken for the next one's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from engine.request import Request
from engine.sampling.token_logprobs import PromptLogprobs
from engine.serving import messages
from engine.serving.adoption import Adoption
from engine.serving.flight import Flight, OutputText
from engine.serving.flight_log import FlightLog
from engine.serving.messages import pack_request, unpack_logprobs
from engine.serving.placing import Placer
from engine.serving.silence import Silence, Silent
from net.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.http.frontend import Output, Overloaded, Unavailable

MAX_REDIRECTS = 2
TIMED_OUT = [-1, None, None, "timed_out", None]
"""Comes among a flight's items at its deadline: one timer instead of one for every token."""

CLOSING = [-1, None, None, "closing", None]
"""Comes among them when this node goes before the request ends."""

CLOSING_REASON = "this node is shutting down"


class AttemptFailed(Exception):
    """A node of this attempt failed; the request can be placed again."""


class Unreachable(Exception):
    """A node of this attempt could not be reached before it had begun: it may be about to come back."""


class Redirected(Exception):
    """The prefill node has become too busy; nothing failed."""


class Attempts:
    """Every attempt of this node's flights that has not ended."""

    def __init__(self, channel: Channel, placer: Placer, log: FlightLog) -> None:
        self._channel = channel
        self._placer = placer
        self._log = log
        self._flights: dict[str, Flight] = {}  # by attempt id
        self._adoption = Adoption(channel)
        self._silence = Silence(channel, placer.suspects, self._flights.values, _fail)
        self.node_suspected = self._silence.suspected
        channel.handle(messages.TOKENS, self._on_tokens)
        channel.handle(messages.PROMPT_LOGPROBS, self._on_prompt_logprobs)
        channel.on_lost(self.node_lost)
        channel.on_closed(self.node_lost)

    def __len__(self) -> int:
        return len(self._flights)

    # --- beginning

    async def adopt(self, flight: Flight) -> bool:
        """Go on with an attempt of an acceptor that was lost; False when no decode node has one."""
        if not await self._adoption.adopt(flight, self._placer.decode_nodes()):
            return False
        self._flights[flight.attempt_id] = flight
        flight.persistence.begun()
        self._log.adopted(flight)
        return True

    async def start(self, flight: Flight) -> None:
        """Place the request and start it: blocks on the decode node first, then the prefill that fills them. Raises
        NotPlaced, Overloaded, Unavailable, AttemptFailed, Unreachable, Redirected."""
        request = Request(
            request_id=flight.attempt_id,
            token_ids=flight.token_ids,
            num_prompt_tokens=flight.num_prompt_tokens,
            sampling=flight.sampling,
            arrival=flight.accepted,
            root=flight.root,
            service_class=flight.service_class,
        )
        placed = await self._placer.place(request, flight.avoid, new=not flight.persistence.promised)
        placement = placed.placement
        self._log.placed(flight, placed)
        self._flights[flight.attempt_id] = flight
        flight.items = asyncio.Queue()
        flight.nodes = {placement.prefill, placement.decode}
        flight.watched = set(flight.nodes)
        body, data = pack_request(request, time.monotonic() - flight.accepted)
        left = max(1.0, flight.deadline - time.monotonic())
        target, asked = None, placement.decode
        back = placement.prefill in flight.avoid  # all others are much later: it stays there
        promise = placed.promise(0 if back else MAX_REDIRECTS - flight.redirects)
        try:
            if placement.decode != placement.prefill:
                reserve = body | {"prefill_node": placement.prefill}
                reply = await self._silence.ask(flight, placement.decode, messages.RESERVE, reserve, data, left)
                target = {
                    "node": placement.decode,
                    "region": reply["region"],
                    "block_ids": reply["blocks"],
                    "first_missing": reply["first_missing"],
                    "epoch": reply["epoch"],
                }
                self._log.reserved(flight, placement.decode)
            body |= {"target": target, "promise": promise}
            asked = placement.prefill
            await self._silence.ask(flight, placement.prefill, messages.PREFILL, body, data, left)
            flight.persistence.begun()
        except RemoteError as error:
            if error.code == "redirect":
                raise Redirected(str(error)) from None
            await self._placer.release(placed)
            if error.code == "overloaded":
                self._log.refused(flight, asked, {"reason": str(error)} | error.facts)
                raise Overloaded(str(error), error.facts["retry_after_s"]) from None
            if error.code == "unknown kind":  # it is here again, and still loads its model
                raise Unreachable(str(error)) from None
            raise AttemptFailed(str(error)) from None
        except (PeerLost, PeerRefused) as error:
            flight.nodes.discard(asked)  # nobody is there to be told of the end
            self._placer.unreachable(asked)
            if asked != placement.prefill:
                await self._placer.release(placed)
            raise Unreachable(str(error)) from None
        except Silent as error:
            raise Unreachable(str(error)) from None
        except TimeoutError:
            raise Unavailable("the request waited for KV blocks until its deadline", retry_after_s=5.0) from None

    # --- on the way

    async def outputs(self, flight: Flight, text: OutputText) -> AsyncGenerator[Output, None]:
        """Outputs until the end or AttemptFailed."""
        left = max(0.0, flight.deadline - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left, flight.items.put_nowait, TIMED_OUT)
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
                    self._log.refused(flight, flight.timeline.nodes["decode"], extra["refused"])
                    raise Overloaded(extra["error"], extra["refused"]["retry_after_s"])
                if finish == "failed":
                    raise AttemptFailed(extra["error"] if extra else "a node failed")
                if finish == "landed":
                    continue
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

    async def _on_tokens(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        for attempt_id, *item in body["items"]:
            flight = self._flights.get(attempt_id)
            if flight is None:
                self._adoption.keep(attempt_id, item)
            else:
                flight.items.put_nowait(item)
                if item[3] not in (None, "landed"):  # ended there, nothing to abort
                    flight.nodes.discard(peer)

    async def _on_prompt_logprobs(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        flight = self._flights.get(body["id"])
        if flight is not None:
            flight.prompt_logprobs = PromptLogprobs.unpack(body, data)

    def node_lost(self, node: str) -> None:
        """Fail the attempts that need `node`."""
        for flight in self._flights.values():
            if node in flight.watched:
                _fail(flight, f"node {node} was lost")

    # --- ends

    def abort(self, flight: Flight) -> None:
        """End the flight's attempt wherever it runs."""
        if self._flights.pop(flight.attempt_id, None) is not None:
            for node in flight.nodes:
                # a lost node cannot be told and need not be: losing us ends the request there
                self._channel.post(node, messages.ABORT, {"ids": [flight.attempt_id]})

    def fail_all(self) -> None:
        """This node goes: their clients are told."""
        for flight in self._flights.values():
            flight.items.put_nowait(CLOSING)


def _fail(flight: Flight, reason: str) -> None:
    """End its attempt, behind what has arrived."""
    flight.items.put_nowait([-1, None, None, "failed", {"events": [], "cached_tokens": 0, "error": reason}])
