"""Attempts of accepted requests: starts each on its nodes, receives their updates, and ends it on all of them.

An attempt is one placement of a request. It has its own id on the engine nodes, so that late updates of an earlier
attempt are not mistaken for updates of the current one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine.core.held_weights import WRONG_WEIGHTS
from engine.core.kv_ready import KvTarget
from engine.front.adoption import Adoption
from engine.front.flight import Flight, OutputText
from engine.front.flight_log import FlightLog
from engine.front.groups import MAX_FAILED_APART
from engine.front.moving import Places
from engine.front.placing import Placer
from engine.front.silence import SignsOfLife, Silence, Silent
from engine.handoff import messages
from engine.handoff.messages import (
    Abort,
    Moving,
    Prefill,
    Promise,
    Reserve,
    ScoredPrompt,
    WireRequest,
    pack_request,
    unpack_prompt_logprobs,
)
from engine.handoff.updates import (
    Closing,
    Ended,
    Failed,
    HandedOver,
    Landed,
    Moved,
    Refused,
    Stayed,
    TimedOut,
    Token,
    Update,
    decode_all,
    ends_there,
)
from engine.prefill_group.messages import Place
from net.bodies import answered, encode, typed
from net.channel.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.http.common.frontend import Output, Overloaded, Unavailable
from sched.placement.choice import Placement

MAX_REDIRECTS = 2
CLOSING_REASON = "this node is shutting down"


class AttemptFailed(Exception):
    """A node of this attempt failed; the request can be placed again."""


class NodeUnreachable(Exception):
    """A node of this attempt could not be reached before the attempt began; the node may be restarting."""


class Redirected(Exception):
    """The prefill node has become too busy; nothing failed."""


class Attempts:
    """All unfinished attempts of this node's flights."""

    def __init__(self, channel: Channel, placer: Placer, log: FlightLog) -> None:
        self._channel = channel
        self._placer = placer
        self._log = log
        self._flights: dict[str, Flight] = {}  # by attempt id
        self._adoption = Adoption(channel)
        self._signs = SignsOfLife(channel, self._awaited, self._found_late)
        self._silence = Silence(channel, placer.suspects, self._flights.values, fail, self._signs.late)
        self.node_suspected = self._silence.suspected
        channel.handle(messages.TOKENS, self._on_tokens)
        channel.handle(messages.MOVING, typed(Moving, self._on_moving))
        channel.handle(messages.PROMPT_LOGPROBS, typed(ScoredPrompt, self._on_prompt_logprobs))
        channel.on_lost(self.node_lost)
        channel.on_closed(self.node_lost)

    # --- beginning

    async def adopt(self, flight: Flight) -> bool:
        """Continue an attempt whose acceptor was lost. Returns False if no decode node keeps one. What runs at another
        site for a bound tenant stays there."""
        if not await self._adoption.adopt(flight, self._placer.decode_nodes(flight.site_bound)):
            return False
        flight.begun = time.monotonic()
        self._flights[flight.attempt_id] = flight
        self._signs.watch()
        flight.persistence.begun()
        self._log.adopted(flight)
        runs(flight)
        return True

    async def start(self, flight: Flight) -> None:
        """Place the request, reserve blocks on its decode node, then start its prefill. Raises NotPlaced, Overloaded,
        Unavailable, AttemptFailed, NodeUnreachable or Redirected."""
        request = flight.as_request()
        one_node = flight.failed_apart >= MAX_FAILED_APART
        placed = await self._placer.place(request, flight.avoid, not flight.persistence.promised, one_node)
        placement = placed.placement
        self._log.placed(flight, placed)
        flight.begun = time.monotonic()
        self._flights[flight.attempt_id] = flight
        flight.items, flight.early = asyncio.Queue(), []
        flight.prefills, flight.beyond = placement.prefills, placement.beyond
        nodes = {*placement.prefills, placement.decode}
        flight.places, flight.apart = Places(nodes, set(nodes)), len(nodes) > 1
        self._signs.watch()
        wire, data = pack_request(request, time.monotonic() - flight.accepted)
        left = max(1.0, flight.deadline - time.monotonic())
        target, asked = None, placement.decode
        # all other nodes are much slower, do not take it, or have failed together, so it must stay
        back = placement.prefill in flight.avoid or placement.beyond or one_node
        promise = placed.promise(0 if back else MAX_REDIRECTS - flight.redirects)
        try:
            if placement.decode != placement.prefill:
                reserve = encode(Reserve(wire, placement.prefills))
                reply = await self._silence.ask(flight, placement.decode, messages.RESERVE, reserve, data, left)
                target = answered(KvTarget, reply)
                self._log.reserved(flight, placement.decode)
            for node, prefill in _prefills(wire, promise, target, placement):
                asked = node
                await self._silence.ask(flight, node, messages.PREFILL, encode(prefill), data, left)
            flight.persistence.begun()
        except RemoteError as error:
            if error.code == "redirect":
                raise Redirected(str(error)) from None
            await self._placer.release(placed)
            helps = asked in placement.prefills[1:]  # one node can compute the prompt without it
            if error.code == "overloaded" and not helps:
                self._log.refused(flight, asked, {"reason": str(error)} | error.facts)
                raise Overloaded(str(error), error.facts["retry_after_s"]) from None
            if error.code == WRONG_WEIGHTS and not (flight.num_output_tokens or flight.resumed):
                raise NodeUnreachable(str(error)) from None  # one of the two nodes has not learnt of a replacement yet
            if error.code == "unknown kind":  # it has restarted and is still loading its model
                raise NodeUnreachable(str(error)) from None
            raise AttemptFailed(str(error)) from None
        except (PeerLost, PeerRefused) as error:
            flight.nodes.discard(asked)  # it cannot receive an abort
            self._placer.unreachable(asked)
            if asked != placement.prefill:
                await self._placer.release(placed)
            raise NodeUnreachable(str(error)) from None
        except Silent as error:
            raise NodeUnreachable(str(error)) from None
        except TimeoutError:
            raise Unavailable("the request waited for KV blocks until its deadline", retry_after_s=5.0) from None
        runs(flight)

    # --- on the way

    async def output(self, flight: Flight, text: OutputText) -> Output:
        """See `next_output`."""
        return await next_output(flight, text, self._log)

    def _awaited(self) -> set[str]:
        """The nodes that owe this acceptor tokens or answers."""
        asked = {flight.asking[0] for flight in self._flights.values() if flight.asking is not None}
        return asked.union(*(flight.watched for flight in self._flights.values()))

    def _found_late(self, node: str) -> None:
        """The node gave no sign of life."""
        suspected = self._placer.suspects(node)
        self._placer.unreachable(node)
        if suspected:  # gossip tells only of new suspicions
            self._silence.suspected(node)

    async def _on_tokens(self, peer: str, body: dict[str, Any], data: memoryview) -> None:
        self._signs.heard(peer)
        for attempt_id, update in decode_all(body):
            flight = self._flights.get(attempt_id)
            if flight is None:
                self._adoption.keep(attempt_id, update)
            elif not (isinstance(update, Failed) and not flight.places.failed(peer)):
                if isinstance(update, Token):
                    flight.places.heard(peer)
                flight.items.put_nowait(update)
                if ends_there(update) and not isinstance(update, HandedOver):
                    flight.nodes.discard(peer)
                self._follow(flight, peer, update)

    def _follow(self, flight: Flight, peer: str, update: Update) -> None:
        """The nodes of the attempt change at once, its tokens in the order in which the client reads them."""
        match update:
            case HandedOver():
                flight.places.handed_over(peer, flight.prefills)
            case Landed() if peer in flight.prefills[:-1]:
                flight.places.watched.discard(peer)  # nothing more is owed by this node
            case Moved(to):
                if (lost := flight.places.moved(peer, to)) is not None:
                    fail(flight, f"node {lost} was lost")
            case Stayed():
                flight.places.stayed(peer)
            case _:
                pass

    async def _on_moving(self, peer: str, body: Moving, data: memoryview) -> None:
        """When this is answered, all earlier tokens of `peer` are in the flight's queue."""
        flight = self._flights.get(body.id)
        if flight is None or peer not in flight.nodes:
            raise RemoteError("the request has ended on its acceptor", code="gone")
        flight.places.announced(peer, body.to)

    async def _on_prompt_logprobs(self, peer: str, body: ScoredPrompt, data: memoryview) -> None:
        flight = self._flights.get(body.id)
        if flight is not None:
            flight.prompt_logprobs = unpack_prompt_logprobs(body, data)

    def node_lost(self, node: str) -> None:
        """Fail the attempts that need `node`."""
        self._signs.lost(node)
        for flight in self._flights.values():
            if flight.places.gone(node):
                fail(flight, f"node {node} was lost")

    # --- ends

    def abort(self, flight: Flight) -> None:
        """End the flight's attempt on all its nodes."""
        flight.runs = False
        if flight.timer is not None:
            flight.timer.cancel()
        if self._flights.pop(flight.attempt_id, None) is not None:
            for node in flight.nodes:
                # a lost node needs no message: losing this acceptor ends the request there
                self._channel.post(node, messages.ABORT, encode(Abort([flight.attempt_id])))

    def fail_all(self) -> None:
        """This node shuts down: every client gets an error."""
        for flight in self._flights.values():
            flight.items.put_nowait(Closing())


def _is_early(flight: Flight, token: Token) -> bool:
    """Whether it came before the first token of the attempt, which another node sends: nothing orders what two nodes
    send, and a decode step can be shorter than a pause of this loop."""
    waits = flight.apart and flight.last_token < flight.begun
    return waits and token.index > flight.num_output_tokens


async def next_output(flight: Flight, text: OutputText, log: FlightLog) -> Output:
    """The next output of a running attempt. Raises AttemptFailed, Overloaded or Unavailable."""
    while True:
        due = flight.early and flight.early[0].index == flight.num_output_tokens
        item = flight.early.pop(0) if due else await flight.items.get()
        match item:
            case Token() if _is_early(flight, item):
                flight.early.append(item)
            case Token(index, token_id, logprobs, finish, report):
                if report is not None:
                    log.reported(flight, report)
                if index < flight.num_output_tokens:
                    continue  # the newest tokens of an adopted request can arrive twice
                if index > flight.num_output_tokens:  # not from an earlier attempt: ids differ
                    raise AttemptFailed(f"token {index} arrived when token {flight.num_output_tokens} was expected")
                log.token(flight)
                flight.token_ids.append(token_id)
                return text.push(token_id, logprobs, finish)
            case Landed(report):
                log.reported(flight, report)
            case Moved(to, report):
                log.moved(flight, to, report)
            case HandedOver() if flight.early:  # the node that made the first token sends this behind it
                raise AttemptFailed(f"token {flight.num_output_tokens} never arrived")
            case HandedOver() | Stayed():
                pass
            case Failed(reason, report, incomplete):
                flight.incomplete = flight.incomplete or incomplete
                if report is not None:
                    log.reported(flight, report)
                raise AttemptFailed(reason)
            case Refused(reason, retry_after_s, facts, report):
                if report is not None:
                    log.reported(flight, report)
                log.refused(flight, flight.timeline.nodes["decode"], facts)
                raise Overloaded(reason, retry_after_s)
            case TimedOut():
                log.timed_out(flight)
                return text.end("abort")
            case Ended(finish):
                return text.end(finish)
            case Closing():
                raise Unavailable(CLOSING_REASON, retry_after_s=1.0)


def _prefills(
    wire: WireRequest, promise: Promise, target: KvTarget | None, placement: Placement
) -> Iterator[tuple[str, Prefill]]:
    """What to ask of each prefill node, the first node of a group first: the others report to it."""
    group = placement.group
    if group is None or target is None:
        yield placement.prefill, Prefill(wire, promise, target, beyond=placement.beyond)
        return
    for i, (node, epoch) in enumerate(zip(group.nodes, target.epochs, strict=True)):
        own = replace(target, epoch=epoch, epochs=())
        later = replace(promise, claim=0, redirects_left=0)  # only the first node was announced, and may redirect
        yield node, Prefill(wire, later if i else promise, own, Place(i, group.nodes, group.cuts))


def runs(flight: Flight) -> None:
    """Mark the attempt as begun and start its deadline timer."""
    flight.runs = True
    left = max(0.0, flight.deadline - time.monotonic())
    flight.timer = asyncio.get_running_loop().call_later(left, flight.items.put_nowait, TimedOut())


def fail(flight: Flight, reason: str) -> None:
    """End the attempt after the updates that have already arrived."""
    flight.items.put_nowait(Failed(reason))
