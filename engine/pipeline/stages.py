"""The stages that this node computes: they agree on the known prefix, and pass hidden states on.

    stage 0   <── known ── every stage: how much of the prefix its blocks hold; the shortest counts for all
    stage i   ── hidden states of a chunk ──> stage i + 1, while it computes its next chunk
              the answer says that they are computed there: a stage is only a few chunks ahead (engine/step/part.py)
    all       ── KV of their layers ──> the decode node's blocks, as any prefill node does

A stage is a request in the node's batcher with a part of the layers (engine/step/part.py). It takes its turn, its
share of a step and its blocks like any other prompt. Whatever goes wrong ends the attempt, and the acceptor places the
request again: what the decode node has whole by then is found again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from engine.core.costs import StepCosts
from engine.core.worker import Worker
from engine.pipeline import messages
from engine.pipeline.messages import Hidden, Known, StageOf
from engine.step.hidden import HiddenQueue, from_bytes, to_bytes
from engine.step.part import Part
from engine.step.request import Request
from engine.step.step import ScheduledRow
from net.bodies import encode, typed
from net.channel.channel import Channel
from net.errors import PeerLost, PeerRefused, RemoteError
from net.loop.tasks import spawn
from net.metrics.events import Metrics
from sched.chunks import plan

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

HIDDEN_TIMEOUT_S = 60.0
"""For the next stage to compute a chunk. Two groups whose nodes have blocks for only one of them each would wait for
one another: after this time one of them gives up."""

MAX_HIDDEN_BYTES = 64 << 20
"""Of one chunk. Messages are not split, and the next one to the same node waits for it."""


@dataclass(slots=True)
class _Stage:
    """One request here."""

    request: Request
    place: StageOf
    known: dict[int, int] = field(default_factory=dict)  # on the first stage: stage -> tokens of its prefix
    prefix: int = 0  # tokens that all stages know
    chunks: int = 0  # computed here
    compute_s: float = 0.0  # in steps here
    passed_bytes: int = 0
    begun: float = 0.0  # monotonic seconds: when the stages agreed
    taken: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # last token of a received chunk -> answer
    passing: list[asyncio.Future[str | None]] = field(default_factory=list)  # chunks sent: the error of each, or None

    @property
    def next(self) -> str:
        return self.place.nodes[self.place.index + 1]


Computed = Callable[[Request, str | None], None]
"""(request, error): a stage that is not the last one has computed the whole prompt, and the next stage has computed
all of its chunks, or will not."""


class Stages:
    """All stages on this node."""

    def __init__(self, channel: Channel, worker: Worker, metrics: Metrics, computed: Computed) -> None:
        self._channel, self._worker, self._metrics, self._all_computed = channel, worker, metrics, computed
        self._stages: dict[str, _Stage] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._inputs: dict[str, HiddenQueue] = worker.follow_parts(self)
        channel.handle(messages.KNOWN, typed(Known, self._on_known))
        channel.handle(messages.HIDDEN, typed(Hidden, self._on_hidden))

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def _costs(self) -> StepCosts:
        return self._worker.costs

    def part_of(self, place: StageOf) -> Part:
        """Raises RemoteError if this node cannot compute that stage."""
        runner, i = self._worker.runner, place.index
        if (reason := runner.why_whole) is not None:
            raise RemoteError(reason, "bad_request")
        model = runner.model
        if place.cuts[-1] != model.config.num_layers or place.nodes[i] != self._channel.node_id:
            raise RemoteError(f"stage {i} of layers {list(place.cuts)} is not for this node", "bad_request")
        most = MAX_HIDDEN_BYTES // (model.config.hidden_size * model.dtype.itemsize)
        return Part(place.cuts[i], place.cuts[i + 1], place.cuts[-1], max(self._worker.batcher.block_size, most))

    def add(self, request: Request, place: StageOf) -> None:
        """The request, which has a part, joins the batcher now."""
        self._stages[request.request_id] = _Stage(request, place)
        if not self._worker.batcher.blocks.prefix_caching:
            self.found(request)  # nothing is looked up

    # --- engine.core.worker.Parts

    def found(self, request: Request) -> None:
        stage = self._stages.get(request.request_id)
        if stage is None or request.part is None or request.part.begun:
            return
        if stage.place.index:
            known = encode(Known(request.request_id, request.num_computed))
            self._channel.post(stage.place.nodes[0], messages.KNOWN, known)
        else:
            self._agree(stage, 0, request.num_computed)

    def computed(self, row: ScheduledRow, begin: float, end: float, hidden: Tensor | None) -> None:
        request = row.request
        stage = self._stages.get(request.request_id)
        if stage is None:
            return
        stage.chunks += 1
        stage.compute_s += end - begin
        done = row.start + row.num_tokens
        if (arrived := self._inputs.get(request.request_id)) is not None:
            arrived.drop_before(done)
            for last in [last for last in stage.taken if last <= done]:
                answer = stage.taken.pop(last)
                if not answer.done():
                    answer.set_result(None)
        if hidden is not None and request.part is not None:
            request.part.unread += 1
            data = to_bytes(hidden)
            stage.passed_bytes += len(data)
            self._metrics.count("mooncake:stage_bytes", len(data))
            body = Hidden(request.request_id, stage.prefix, row.start, row.num_tokens)
            stage.passing.append(self._spawn(self._pass_on(stage, body, data)))
        passed_all = hidden is not None and done == request.num_tokens
        if row.samples or passed_all:
            self._note(stage, end)
        if passed_all:
            self._spawn(self._passed_all(stage))

    def _note(self, stage: _Stage, end: float) -> None:
        """The last chunk is computed: record what this stage did."""
        place, part = stage.place, stage.request.part
        assert part is not None
        self._metrics.count("mooncake:stages")
        detail = {
            "index": place.index,
            "nodes": list(place.nodes),
            "layers": [part.begin, part.end],
            "prefix_tokens": stage.prefix,
            "chunks": stage.chunks,
            "compute_s": stage.compute_s,
            "seconds": end - stage.begun,  # from the agreement to the end of the last chunk
            "hidden_bytes": stage.passed_bytes,
        }
        stage.request.journal.note(end, "stage", detail)

    # --- the known prefix

    async def _on_known(self, peer: str, body: Known, data: memoryview) -> None:
        stage = self._stages.get(body.id)
        if stage is not None and peer in stage.place.nodes:
            self._agree(stage, stage.place.nodes.index(peer), body.tokens)

    def _agree(self, stage: _Stage, index: int, tokens: int) -> None:
        """On the first stage: when all prefixes are known, begin."""
        stage.known[index] = tokens
        request = stage.request
        if len(stage.known) < len(stage.place.nodes) or request.part is None or request.part.begun:
            return
        size = self._worker.batcher.block_size
        start = min(min(stage.known.values()), request.num_computed) // size * size
        stages, most = len(stage.place.nodes), min(request.part.most, self._worker.batcher.max_num_batched_tokens)
        sizes = plan(request.num_tokens, start, stages, self._costs.prefill.coefficients, most, size)
        self._begin(stage, start)
        self._worker.batcher.begin_part(request, start, sizes)
        self._worker.wake()

    def _begin(self, stage: _Stage, prefix: int) -> None:
        stage.prefix, stage.begun = prefix, time.monotonic()

    # --- hidden states

    async def _passed_all(self, stage: _Stage) -> None:
        """The stage owes its chunks until the next one has computed them."""
        errors = await asyncio.gather(*stage.passing)
        self._all_computed(stage.request, next((error for error in errors if error is not None), None))

    async def _pass_on(self, stage: _Stage, body: Hidden, data: memoryview) -> str | None:
        """Returns the reason why the next stage will not compute it, if there is one."""
        request = stage.request
        assert request.part is not None
        try:
            await self._channel.call(stage.next, messages.HIDDEN, encode(body), [data], HIDDEN_TIMEOUT_S)
        except (PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            reason = f"the stage of its pipeline on {stage.next} failed: {error}"
            self._worker.fail(request, reason)
            return reason
        request.part.unread -= 1
        self._worker.wake()
        return None

    async def _on_hidden(self, peer: str, body: Hidden, data: memoryview) -> None:
        """Answers when the chunk is computed here. Raises RemoteError if the request has ended."""
        stage = self._stages.get(body.id)
        if stage is None or stage.request.finished or stage.request.part is None:
            raise RemoteError("the request has ended on the next stage", "gone")
        request, part = stage.request, stage.request.part
        if stage.place.index == 0 or peer != stage.place.nodes[stage.place.index - 1]:
            raise RemoteError(f"{peer} is not the stage before this one", "bad_request")
        if not part.begun:
            if body.prefix > request.num_computed or body.prefix != body.start:
                raise RemoteError(f"this stage has {request.num_computed} tokens, not {body.prefix}", "incomplete")
            self._begin(stage, body.prefix)
            self._worker.batcher.begin_part(request, body.prefix)
            self._inputs[body.id] = HiddenQueue(body.prefix)
        if body.start != part.available or body.start + body.count > request.num_tokens:
            raise RemoteError(f"tokens {body.start}+{body.count} do not follow {part.available}", "bad_request")
        model = self._worker.weights.runner(request.weights).model
        try:
            piece = from_bytes(data, body.count, model.config.hidden_size, model.dtype)
        except ValueError as error:
            raise RemoteError(str(error), "bad_request") from None
        self._inputs[body.id].add(piece)
        part.available += body.count
        answer = stage.taken[part.available] = asyncio.get_running_loop().create_future()
        self._worker.wake()
        await answer

    # --- ends

    def end(self, request_id: str) -> None:
        """The request has ended here: what waits for it gets an error. Idempotent."""
        stage = self._stages.pop(request_id, None)
        self._inputs.pop(request_id, None)
        for answer in () if stage is None else stage.taken.values():
            if not answer.done():
                answer.set_exception(RemoteError("the request has ended on the next stage", "gone"))
                answer.exception()  # the caller may be gone as well

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = spawn(work, "hidden states for the next stage")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for request_id in list(self._stages):
            self.end(request_id)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
