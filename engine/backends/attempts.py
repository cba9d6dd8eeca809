"""Attempts of accepted requests on workers: asks one, passes on its tokens, and hangs up when the client does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp

from cache.block import BlockKey
from engine.backends.answer import Answer, AnswerError
from engine.backends.placing import WorkerPlacer
from engine.backends.question import question
from engine.backends.worker import Worker
from engine.front.attempts import AttemptFailed, NodeUnreachable, Redirected, fail, next_output, runs
from engine.front.flight import Flight, OutputText
from engine.front.flight_log import FlightLog
from engine.front.moving import Places
from engine.handoff.updates import Closing, Ended, Token
from net.http.common.frontend import Output, Overloaded, Unavailable
from net.loop.tasks import spawn

BUSY = (429, 503)
WRONG = (400, 404, 413, 422)
FULL_RETRY_S = 1.0
SHOWN_CHARS = 300


class WorkerAttempts:
    """All unfinished attempts of this node's flights. `root`: of the keys of requests without a salt."""

    def __init__(self, workers: Mapping[str, Worker], placer: WorkerPlacer, log: FlightLog, root: BlockKey) -> None:
        self._workers, self._placer, self._log, self._root = workers, placer, log, root
        self._flights: dict[str, Flight] = {}  # by attempt id
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def adopt(self, flight: Flight) -> bool:
        """A worker drops a request whose acceptor is lost, so there is nothing to continue."""
        return False

    async def start(self, flight: Flight) -> None:
        """Place the request and ask its worker; returns when the worker has accepted it. Raises ValueError, NotPlaced,
        Overloaded, Unavailable, AttemptFailed, NodeUnreachable or Redirected."""
        if flight.sampling.grammar and flight.num_output_tokens:
            raise Unavailable("the worker of a structured answer was lost; no other one can continue it", 1.0)
        placed = self._placer.place(flight.as_request(), flight.avoid, new=not flight.persistence.promised)
        placement = placed.placement
        self._log.placed(flight, placed)
        if not flight.num_output_tokens:
            flight.timeline.cached_tokens = placement.prefix_tokens  # until the worker tells
        worker, name = self._workers[placement.prefill], flight.attempt_id
        salt = None if flight.root == self._root else flight.root
        body = question(worker.model, flight.token_ids, flight.num_prompt_tokens, flight.sampling, salt)
        flight.begun = time.monotonic()
        self._flights[name] = flight
        flight.items = asyncio.Queue()
        flight.places = Places({worker.name}, set())
        worker.load.sent(name, flight.begun, len(flight.token_ids), placement.prefix_tokens)
        try:
            async with asyncio.timeout(max(1.0, flight.deadline - flight.begun)):
                response = await worker.ask(body)
        except aiohttp.ServerTimeoutError as error:  # also a TimeoutError; no connection: it may only be busy
            worker.look()
            flight.avoid.add(worker.name)
            raise NodeUnreachable(f"{worker.name}: {error}") from None
        except TimeoutError:
            raise Unavailable(f"{worker.name} did not accept the request until its deadline", 5.0) from None
        except (aiohttp.ClientError, OSError) as error:
            worker.gone(str(error) or type(error).__name__)
            raise NodeUnreachable(f"{worker.name}: {error}") from None
        if response.status != 200:
            await self._refused(flight, worker, response)
        flight.persistence.begun()
        self._reading[name] = spawn(self._read(flight, name, worker, response), f"answer of {worker.name}")
        runs(flight)

    async def output(self, flight: Flight, text: OutputText) -> Output:
        """See engine.front.attempts.next_output."""
        return await next_output(flight, text, self._log)

    def worker_lost(self, name: str) -> None:
        """Fail the attempts on this worker."""
        for flight in self._flights.values():
            if name in flight.watched:
                flight.avoid.add(name)
                fail(flight, f"{name} was lost")

    def abort(self, flight: Flight) -> None:
        """Hang up: a worker aborts the request of a closed connection."""
        flight.runs = False
        if flight.timer is not None:
            flight.timer.cancel()
        name = flight.attempt_id
        if self._flights.pop(name, None) is None:
            return
        for worker in flight.watched:
            self._workers[worker].load.ended(name, time.monotonic())
        if (reading := self._reading.pop(name, None)) is not None:
            reading.cancel()

    def fail_all(self) -> None:
        """This node shuts down: every client gets an error."""
        for flight in self._flights.values():
            flight.items.put_nowait(Closing())

    async def _refused(self, flight: Flight, worker: Worker, response: aiohttp.ClientResponse) -> None:
        """Raises what the worker's refusal means."""
        try:
            said = (await response.text())[:SHOWN_CHARS]
        except (aiohttp.ClientError, OSError) as error:
            said = str(error)
        finally:
            response.close()
        reason = f"{worker.name} answers {response.status}: {said}"
        if response.status in BUSY:
            self._log.refused(flight, worker.name, {"reason": reason})
            if flight.redirects < len(self._workers) - 1:
                raise Redirected(reason)
            raise Overloaded(reason, FULL_RETRY_S)
        if response.status in WRONG and not flight.num_output_tokens:
            raise ValueError(reason)
        flight.avoid.add(worker.name)
        raise AttemptFailed(reason)

    async def _read(self, flight: Flight, name: str, worker: Worker, response: aiohttp.ClientResponse) -> None:
        answer, last = Answer(flight.num_output_tokens), None
        reason = "it ended the stream before the answer was complete"
        try:
            rest = b""
            async for data in response.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    for update in answer.line(line):
                        worker.load.token(name, time.monotonic())
                        if isinstance(update, Ended) or update.finish is not None:
                            last = update  # the line after it has the number of cached tokens
                        else:
                            flight.items.put_nowait(update)
                if last is not None and (answer.done or answer.cached_tokens is not None):
                    break
        except AnswerError as error:
            reason = str(error)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            worker.look()  # one broken connection is not yet a lost worker
        finally:
            response.close()
        if last is not None:
            self._complete(flight, answer, last)
        elif name in self._flights:
            flight.avoid.add(worker.name)
            fail(flight, f"{worker.name}: {reason}")

    def _complete(self, flight: Flight, answer: Answer, last: Token | Ended) -> None:
        if answer.cached_tokens is not None and flight.attempt == 0:
            flight.timeline.cached_tokens = min(answer.cached_tokens, flight.num_prompt_tokens)
        flight.items.put_nowait(last)
