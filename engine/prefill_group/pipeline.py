"""Chunked pipeline parallelism: each node computes some of the layers, and hidden states go from one to the next.

stage i   ── hidden states of a chunk ──> stage i + 1, while it computes its next chunk
          the answer says that they are computed there: a stage is only a few chunks ahead (engine/step/part.py)
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from engine.prefill_group import messages
from engine.prefill_group.member import MAX_MESSAGE_BYTES, Common, Member
from engine.prefill_group.messages import Hidden, Place
from engine.step.hidden import HiddenQueue, from_bytes, to_bytes
from engine.step.part import Stage
from engine.step.step import ScheduledRow
from net.bodies import encode, typed
from net.errors import PeerLost, PeerRefused, RemoteError
from sched.chunks import plan

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN_TIMEOUT_S = 60.0
"""For the next stage to compute a chunk, with all that its node computes before. Groups that would wait for each
other's blocks end at once (sched/placement/groups/giving_way.py)."""


class Pipeline:
    """The stages on this node; a Way (member.py)."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._taken: dict[str, dict[int, asyncio.Future[None]]] = {}  # id -> last token of a received chunk -> answer
        common.channel.handle(messages.HIDDEN, typed(Hidden, self._on_hidden))

    def part_of(self, place: Place) -> Stage:
        worker, i = self._common.worker, place.index
        model = worker.runner.model
        if place.cuts[-1] != model.config.num_layers:
            raise RemoteError(f"stage {i} of layers {list(place.cuts)} is not of this model", "bad_request")
        most = MAX_MESSAGE_BYTES // (model.config.hidden_size * model.dtype.itemsize)
        return Stage(place.cuts[i], place.cuts[i + 1], place.cuts[-1], max(worker.batcher.block_size, most))

    def agreed(self, member: Member, tokens: int) -> None:
        request, worker = member.request, self._common.worker
        assert request.part is not None
        stages, most = len(member.place.nodes), min(request.part.most, worker.batcher.max_num_batched_tokens)
        fixed, *rest = worker.costs.prefill.coefficients
        # A chunk reads the weights of a stage's layers at least. The fit of long chunks hardly sees this.
        costs = max(fixed, worker.costs.decode.estimate(1, 0) / stages), *rest
        sizes = plan(request.num_tokens, tokens, stages, costs, most, worker.batcher.block_size)
        self._begin(member, tokens)
        worker.batcher.begin_part(request, tokens, sizes)
        worker.wake()

    def _begin(self, member: Member, prefix: int) -> None:
        member.prefix, member.begun = prefix, time.monotonic()

    def computed(self, member: Member, row: ScheduledRow, hidden: Tensor | None) -> bool:
        part, done = member.request.part, row.start + row.num_tokens
        assert isinstance(part, Stage)
        if isinstance(arrived := self._common.inputs.get(member.id), HiddenQueue):
            arrived.drop_before(done)
            taken = self._taken.get(member.id, {})
            for last in [last for last in taken if last <= done]:
                answer = taken.pop(last)
                if not answer.done():
                    answer.set_result(None)
        if hidden is not None:
            ahead = part.ahead(row.num_tokens)
            part.unread += ahead
            data = to_bytes(hidden)
            self._common.sent(member, data)
            body = Hidden(member.id, member.prefix, row.start, row.num_tokens)
            member.sending.append(self._common.spawn(self._pass_on(member, part, ahead, body, data)))
        return row.samples or (hidden is not None and done == member.request.num_tokens)

    def detail(self, member: Member) -> dict[str, Any]:
        cuts, i = member.place.cuts, member.place.index
        return {"layers": [cuts[i], cuts[i + 1]]}

    # --- hidden states

    async def _pass_on(self, member: Member, part: Stage, ahead: float, body: Hidden, data: memoryview) -> str | None:
        """ahead: what it adds to `part.unread` until it is taken. Returns the reason why the next stage will not
        compute it, if there is one."""
        following = member.place.nodes[member.place.index + 1]
        try:
            await self._common.channel.call(following, messages.HIDDEN, encode(body), [data], HIDDEN_TIMEOUT_S)
        except (PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            reason = f"the stage of its pipeline on {following} failed: {error}"
            self._common.worker.fail(member.request, reason)
            return reason
        part.unread -= ahead
        self._common.worker.wake()
        return None

    async def _on_hidden(self, peer: str, body: Hidden, data: memoryview) -> None:
        """Answers when the chunk is computed here. Raises RemoteError if the request has ended."""
        member = self._common.members.get(body.id)
        if member is None or member.request.finished or not isinstance(member.request.part, Stage):
            raise RemoteError("the request has ended on the next stage", "gone")
        request, part, worker = member.request, member.request.part, self._common.worker
        if member.place.index == 0 or peer != member.place.nodes[member.place.index - 1]:
            raise RemoteError(f"{peer} is not the stage before this one", "bad_request")
        if not part.begun:
            if body.prefix > request.num_computed or body.prefix != body.start:
                raise RemoteError(f"this stage has {request.num_computed} tokens, not {body.prefix}", "incomplete")
            self._begin(member, body.prefix)
            worker.batcher.begin_part(request, body.prefix)
            self._common.inputs[body.id] = HiddenQueue(body.prefix)
        if body.start != part.available or body.start + body.count > request.num_tokens:
            raise RemoteError(f"tokens {body.start}+{body.count} do not follow {part.available}", "bad_request")
        model, queue = worker.weights.runner(request.weights).model, self._common.inputs[body.id]
        assert isinstance(queue, HiddenQueue)
        try:
            piece = from_bytes(data, body.count, model.config.hidden_size, model.dtype)
        except ValueError as error:
            raise RemoteError(str(error), "bad_request") from None
        queue.add(piece)
        part.arrived(body.count)
        answer = asyncio.get_running_loop().create_future()
        self._taken.setdefault(body.id, {})[part.available] = answer
        worker.wake()
        await answer

    def end(self, member: Member) -> None:
        for answer in self._taken.pop(member.id, {}).values():
            if not answer.done():
                answer.set_exception(RemoteError("the request has ended on the next stage", "gone"))
                answer.exception()  # the caller may be gone as well
