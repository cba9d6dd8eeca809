"""The engine loop of a prefill, decode or mixed node: schedule, compute in one thread, commit, repeat.

The batcher decides and the runner computes. This shell owns the clock, the executor thread and the background
transfers of blocks: it loads prefixes before a request starts, sends KV to the decode node while the request computes,
and publishes blocks afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from cache.block import BlockKey
from cache.pool.policy import Facts
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.emissions import Emission, Emit, hand_out
from engine.core.handed_out import HandedOut
from engine.core.held_weights import WRONG_WEIGHTS, HeldWeights
from engine.core.kv_transfer import KvTransfer
from engine.core.lost_experts import settle_losses
from engine.core.model_steps import Inputs, ModelSteps
from engine.core.prefix_loads import Loader, PrefixLoads
from engine.core.priority import step_back
from engine.core.step_recorder import StepRecorder
from engine.sampling.sampler import Sampled
from engine.speculation.draft import DraftModel
from engine.speculation.layer_drafts import LayerDrafts
from engine.speculation.speculative import Speculator, accepted
from engine.step.cold import Cold, PartLost
from engine.step.request import Request, RequestState
from engine.step.runner import Runner
from engine.step.step import ScheduledRow, Step
from net.errors import RemoteError
from net.loop.restarts import Restarts
from net.loop.tasks import keep
from net.metrics.events import Metrics

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("mooncake.engine")

BLOCKED_RETRY_S = 0.02

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Produced:
    """A committed step: its results still have to be handed out, and its time has to be learned."""

    emissions: Sequence[Emission]
    step: Step
    ran: tuple[float, float]  # begin and end, in monotonic seconds
    predicts: bool  # its time says how long other steps take
    num_decoded: int  # tokens of its requests that decode


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding: the planner of drafts, and what proposes them, if they are not looked up."""

    speculator: Speculator | None = None
    model: DraftModel | LayerDrafts | None = None


@dataclass(frozen=True, slots=True)
class StepThread:
    """The thread that computes."""

    nice: int = 0
    recorder: StepRecorder | None = None


NO_DRAFTS, OWN_THREAD = Drafts(), StepThread()


class Publisher(Protocol):
    """Publishes full blocks to the pooled store (engine/handoff/reuse.py)."""

    def publish(self, named: Sequence[tuple[BlockKey, int, Facts]]) -> None:
        """Queue blocks as (key, block id, facts); they are held until written or given up."""

    def held_blocks(self) -> Iterator[int]:
        """Block ids, one item per transfer reference held here."""


class Parts(Protocol):
    """Follows requests of which this node computes some layers or some tokens (engine/prefill_group/members.py)."""

    def found(self, request: Request) -> None:
        """The request's prefix has been looked up: its blocks hold the first `num_computed` tokens."""

    def computed(self, row: ScheduledRow, begin: float, end: float, hidden: Tensor | None) -> None:
        """A step, from `begin` to `end` in monotonic seconds, has computed this row, or some of the layers of its part
        (`row.ends`). `hidden`: for the next stage; None before, on the last one, and if all layers are computed
        here."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Loads known prefixes and publishes full blocks."""

    loader: Loader
    publisher: Publisher


class Worker:
    """Runs steps from `start` until closed."""

    def __init__(
        self,
        batcher: Batcher,
        runner: Runner,
        reuse: Reuse,
        costs: StepCosts,
        metrics: Metrics,
        drafts: Drafts = NO_DRAFTS,
        thread: StepThread = OWN_THREAD,
    ) -> None:
        self.batcher = batcher
        self.weights = HeldWeights(runner)
        self.costs = costs
        self._loads = PrefixLoads(batcher, reuse.loader, self._loaded)
        self._publisher = reuse.publisher
        self._metrics = metrics
        self._speculator = drafts.speculator
        self._recorder = thread.recorder
        self._idle = True  # since the last step
        self._transfers: dict[str, KvTransfer] = {}
        eos_token_ids = tuple(batcher.eos_token_ids)
        self._model = ModelSteps(self.weights, drafts.model, eos_token_ids, self._loads.arriving, self._transfers)
        self._parts: Parts | None = None
        self._preemptions_seen = 0
        self._handed_out = HandedOut()
        self._wake = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, "engine", step_back, (thread.nice,))
        self._loop_task: asyncio.Task[None] | None = None
        self._in_flight: tuple[Step, asyncio.Future[list[list[Sampled]]]] | None = None
        self.lost: str | None = None  # why the loop ended

    @property
    def runner(self) -> Runner:
        """Computes new requests."""
        return self.weights.runner(self.weights.current)

    # --- requests

    def add(self, request: Request, transfer: KvTransfer | None = None) -> None:
        """Queue a request; `transfer` sends its KV while the steps compute it. Raises RemoteError as `check` does."""
        self.check(request)
        self.batcher.add(time.monotonic(), request)
        if transfer is not None:
            self._transfers[request.request_id] = transfer
        self._look_up()  # before it counts as one that could run
        self.wake()

    def _look_up(self) -> None:
        """Look for the prefixes of the next waiting requests at once: while a step runs, so that the next one can have
        them."""
        if self._loop_task is None or self._loop_task.done():
            return
        try:
            self._loads.start(time.monotonic())
        except Exception:  # such as one of the user's queue order; the loop meets it as well, and ends the node
            log.exception("could not look for prefixes")

    def check(self, request: Request | None = None) -> None:
        """Raises RemoteError when the loop has ended, or if this node may not compute `request` with its weights."""
        if self.lost is not None:
            raise RemoteError(self._farewell, "lost")
        if request is not None and not self.weights.serves(request.weights, begun=request.first_output_index > 0):
            raise RemoteError(
                f"this node does not serve weights {request.weights.hex() or 'of the start'}: it has "
                f"{self.weights.current.hex() or 'those of the start'}",
                WRONG_WEIGHTS,
            )

    def follow_parts(self, parts: Parts) -> Inputs:
        """`parts` hears of every request with a part. Returns the inputs of parts from other nodes by request id; the
        caller adds what arrives."""
        self._parts = parts
        return self._model.inputs

    def _loaded(self, request: Request) -> None:
        if self._parts is not None and request.part is not None and not request.finished:
            self._parts.found(request)
        if request.cold is not None and not request.cold.open:
            self.fail(request, request.cold.refused or "its room could not be found")
        self.wake()
        self._look_up()

    def fail(self, request: Request, reason: str) -> None:
        """End a request that cannot go on; its acceptor places it again."""
        if not request.finished:
            self.abort(request.request_id)
            self._emit([Emission(request, None, error=reason)])

    def publish(self, named: Sequence[tuple[BlockKey, int, Facts]]) -> None:
        """See Publisher.publish."""
        self._publisher.publish(named)

    def uses(self, weights: bytes) -> bool:
        """Whether a request of this node, or the running step, needs these weights."""
        running = self._in_flight[0].rows if self._in_flight is not None else ()
        requests = (*self.batcher.requests.values(), *self.batcher.seats.claims, *(row.request for row in running))
        return any(request.weights == weights for request in requests)

    def wake(self) -> None:
        """Tell the loop that a request may have become runnable, for which the running step may have to end."""
        self._wake.set()
        if self._in_flight is not None and self._in_flight[0].may_end:
            self._model.lets_in_at(self.batcher.lets_in_at())

    def abort(self, request_id: str) -> Request | None:
        """End a request. The caller takes its transfer, if any, with `take_transfer`."""
        request = self.batcher.abort(time.monotonic(), request_id)
        self._loads.arriving.drop(request_id)
        if request is not None:
            self.wake()
        return request

    def take_transfer(self, request_id: str) -> KvTransfer | None:
        """Hand over the transfer of a request that has ended."""
        return self._transfers.pop(request_id, None)

    def held_blocks(self) -> Iterator[int]:
        """The block ids of all transfer references that this worker holds, one item per reference."""
        yield from self._loads.loader.held_blocks()
        yield from self._publisher.held_blocks()
        for transfer in self._transfers.values():
            yield from transfer.held_blocks()

    def request_blocks(self) -> Iterator[int]:
        """The block ids of all requests and of prefixes being loaded for them, one item per request reference."""
        yield from self.batcher.held_blocks()
        yield from self._loads.loader.fresh_blocks()

    # --- the loop

    def start(self, emit: Emit) -> None:
        """`emit` receives what each step produced, in one call."""
        self._emit = emit
        self._loop_task = keep(self._run, "engine loop", Restarts(0))

    async def lift(self, request: Request) -> bool:
        """Take a request that decodes out of the batch, to move it to another node. When this returns, no step computes
        it, and all its tokens have been handed out. Returns False if it does not decode here or has ended meanwhile."""
        lifted = self.batcher.lift(time.monotonic(), request)
        if lifted:
            await self._handed_out.all(running=self.batcher.in_step(request))
        return lifted and not request.finished

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run in the engine thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def close(self) -> None:
        """Stop after the running step; unfinished requests are aborted."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await self._loads.close()
        await asyncio.gather(*(transfer.stop() for transfer in self._transfers.values()))
        self._transfers.clear()
        self._executor.shutdown(wait=True)
        if self._recorder is not None:
            self._recorder.close()
        for request_id in list(self.batcher.requests):
            self.batcher.abort(time.monotonic(), request_id)
        self._handed_out.ended()

    async def _run(self) -> None:
        """A step that raises ends its requests. An exception outside a step, in a policy or in the books of the pool,
        leaves an unknown state: the node stops computing, and the acceptors place its requests again."""
        try:
            await self._steps()
        except Exception as error:
            self.lost = f"{type(error).__name__}: {error}"
            self._handed_out.ended()
            if self._in_flight is not None:
                step, running = self._in_flight
                await asyncio.wait([running])  # the step writes into the blocks of its requests
                self._try(partial(self._fail, step, self._farewell))
            for request in list(self.batcher.requests.values()):
                self._try(partial(self._end, request))
            raise

    @property
    def _farewell(self) -> str:
        return f"the node cannot compute any more: {self.lost}"

    def _end(self, request: Request) -> None:
        self.batcher.abort(time.monotonic(), request.request_id)
        self._emit([Emission(request, None, error=self._farewell)])

    def _try(self, end: Callable[[], None]) -> None:
        """Call `end`; the broken books may make it raise."""
        try:
            end()
        except Exception:
            log.exception("could not end a request")

    async def _steps(self) -> None:
        """The loop first does what the engine thread waits for: commit, schedule, submit. It learns from a step, which
        may fit a model again, and hands out its results, while the next step computes."""
        loop = asyncio.get_running_loop()
        produced: _Produced | None = None
        while True:
            self._loads.start(time.monotonic())
            step = self.batcher.schedule(time.monotonic())
            for request, reason in self.batcher.stuck():
                self.fail(request, reason)
            if step is not None and step.may_end:
                self._model.lets_in_at(self.batcher.lets_in_at())
            running = None if step is None else loop.run_in_executor(self._executor, self._model.run, step, loop)
            self._in_flight = None if step is None or running is None else (step, running)
            if running is not None:
                self._handed_out.submitted()
            if produced is not None:
                self._learn(produced)
            self.costs.started(step, time.monotonic(), self._model.drafting_s(step))
            if produced is not None:
                await self._hand_out(produced)
                produced = None
                if step is None:
                    continue  # handing out may have made a request runnable
            self._gauge()
            if step is None or running is None:
                await self._sleep()
                continue
            try:
                sampled = await running
            except Exception as error:
                self._in_flight = None
                log.exception("a step of %d requests failed", len(step.rows))
                self._fail(step, f"{type(error).__name__}: {error}")
                self._handed_out.done()
                continue
            self._in_flight = None
            if self._model.gave_way:
                self._give_way(step)
                continue
            produced = self._commit(step, sampled, await self._settle(step))

    async def _sleep(self) -> None:
        """Sleep until `wake`. Transfers free blocks silently, so a blocked queue retries every BLOCKED_RETRY_S."""
        self._idle = True
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCKED_RETRY_S if self.batcher.waiting else None):
                await self._wake.wait()

    async def _settle(self, step: Step) -> list[Emission]:
        """Wait for the loads of the step. Returns an error emission for each request with an incomplete prefix, and for
        each whose cold blocks could not be read. One for which another node is late goes on when that has answered; a
        part that has not passed all its layers, in a later step."""
        for place, layer in self._model.ended.items():
            step.rows[place].stay(layer)
        for place, late in self._model.late.items():
            if (cold := step.rows[place].request.cold) is not None:
                step.rows[place].stay(cold.layers_left.start)
                cold.late(late.layer)
                late.then(partial(asyncio.get_running_loop().call_soon_threadsafe, self._answered, cold))
        failed = [
            Emission(request, None, error="its prefix arrived incomplete", incomplete=True)
            for request in await self._loads.settle(row.request for row in step.rows)
        ]
        for place, error in self._model.unread.items():
            request, reason = step.rows[place].request, f"{type(error).__name__}: {error}"
            damaged = not isinstance(error, PartLost)  # what other memories have of it is whole
            if self.batcher.abort(time.monotonic(), request.request_id) is not None:
                failed.append(Emission(request, None, error=reason, incomplete=damaged))
        return failed

    def _answered(self, cold: Cold) -> None:
        cold.waits = False
        self.wake()

    def _give_way(self, step: Step) -> None:
        """Its rows lose the time of the step."""
        begin, end = self._model.ran
        if self._recorder is not None:
            self._recorder.add(step, begin, end, self._idle, True)
        self._idle = False
        for row in step.rows:
            row.request.journal.computed(begin, end, 0, 0.0 if row.decodes else end - begin)
        self.costs.waited((row.request for row in step.rows), end - begin)
        self.batcher.gave_way(time.monotonic(), step)
        self._handed_out.done()

    def _commit(self, step: Step, sampled: Sequence[Sequence[Sampled]], failed: Sequence[Emission]) -> _Produced:
        """failed: error emissions of requests that cannot continue."""
        begin, end = self._model.ran
        # The times of steps that waited for a prefix, used several weights, computed the logits of a prompt or read
        # cold blocks do not predict other steps.
        predicts = not self._model.unusual and not any(r.request.scores_prompt or r.request.cold for r in step.rows)
        if self._recorder is not None:
            self._recorder.add(step, begin, end, self._idle, self._model.unusual)
        self._idle = False
        others_s = [(end - begin) * share for share in step.other_prompts()]
        for row, seconds in zip(step.rows, others_s, strict=True):
            row.request.journal.computed(begin, end, row.num_tokens if row.ends else 0, seconds)
        self.costs.ran(step, begin, others_s)
        self.costs.waited(step.left_out, end - begin)
        failed = [*failed, *settle_losses(time.monotonic(), self.batcher, step, self._model.losses)]
        tokens = [self._kept(place, row, sampled[place]) for place, row in enumerate(step.rows)]
        done = self.batcher.commit(time.monotonic(), step, tokens)
        emissions = list(failed)
        for request, index, kept in done.emitted:
            for i, token in enumerate(sampled[index][:kept], 1):
                emissions.append(Emission(request, token.token_id, token.logprobs, num_behind=kept - i))
        # This holds the blocks before the next schedule, which may preempt their request and reuse them.
        self._publisher.publish(done.named)
        for index, row in enumerate(step.rows):
            if self._parts is not None and row.request.part is not None:
                self._parts.computed(row, begin, end, self._model.passed.get(index))
        decoded = sum(kept for _, index, kept in done.emitted if step.rows[index].decodes)
        return _Produced(emissions, step, (begin, end), predicts, decoded)

    def _learn(self, produced: _Produced) -> None:
        begin, end = produced.ran
        if produced.predicts:
            self.costs.observe(produced.step, end - begin)
        self.costs.decoded(produced.step, begin, end, produced.num_decoded)

    def _kept(self, place: int, row: ScheduledRow, chosen: Sequence[Sampled]) -> list[int] | None:
        """The valid tokens of a row: those that match its draft, and the token after them."""
        if not chosen:
            return None
        tokens = [token.token_id for token in chosen]
        right = accepted(row.draft, tokens)
        if row.decodes and self._speculator is not None:
            self._speculator.decoded(row.request)
        if row.draft and self._speculator is not None:
            self._speculator.verified(row.request, len(row.draft), right)
            self._metrics.count_draft(len(row.draft), right)
        self._model.kept(place, row.request, right)
        return tokens[: right + 1]

    async def _hand_out(self, produced: _Produced) -> None:
        self._metrics.observe("vllm:iteration_tokens_total", produced.step.num_tokens)
        await hand_out(produced.emissions, self._emit)
        self._handed_out.done()
        now = time.monotonic()
        for emission in produced.emissions:
            self.costs.handed_out(emission.request.request_id, now)
        if self._recorder is not None:
            self._recorder.write()

    def _fail(self, step: Step, error: str) -> None:
        """Handle a step that raised: its requests end, and the node continues."""
        ended = self.batcher.fail(time.monotonic(), step)
        for request in ended:
            self._loads.arriving.drop(request.request_id)
        self._emit([Emission(request, None, error=error) for request in ended])

    def _gauge(self) -> None:
        running = len(self.batcher.running)
        waiting = sum(r.state is not RequestState.RUNNING for r in self.batcher.requests.values())
        usage = self.batcher.pool.usage()
        self._metrics.set_load(running, waiting, usage["held"] / usage["total"])
        self._metrics.count("vllm:num_preemptions", self.batcher.num_preemptions - self._preemptions_seen)
        self._preemptions_seen = self.batcher.num_preemptions
