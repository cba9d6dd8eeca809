"""All requests that this node computes in groups: the nodes agree on the known prefix, then begin.

    first node  <── known ── every node: how much of the prefix its blocks hold; the shortest counts for all
    all         ── KV of their part ──> the decode node's blocks, as any prefill node does

In between, pipeline.py and context.py say what goes from node to node. A member is a request in the node's batcher with
a part of the prompt (engine/step/part.py). It takes its turn, its share of a step and its blocks like any other prompt.
Whatever goes wrong ends the attempt, and the acceptor places the request again: what the decode node has whole by then
is found again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.core.kv_transfer import KvTransfer
from engine.core.worker import Worker
from engine.prefill_group import messages
from engine.prefill_group.context import Context
from engine.prefill_group.member import Common, Computed, Member, Way
from engine.prefill_group.messages import Known, Place
from engine.prefill_group.pipeline import Pipeline
from engine.step.part import Part
from engine.step.request import Request
from engine.step.step import ScheduledRow
from net.bodies import encode, typed
from net.channel.channel import Channel
from net.errors import RemoteError
from net.metrics.events import Metrics

if TYPE_CHECKING:
    from torch import Tensor


class Members:
    """All members on this node."""

    def __init__(self, channel: Channel, worker: Worker, metrics: Metrics, computed: Computed) -> None:
        self._common = Common(channel, worker, metrics)
        self._members = self._common.members
        self._all_computed = computed
        self._pipeline, self._context = Pipeline(self._common), Context(self._common)
        self._common.inputs = worker.follow_parts(self)
        channel.handle(messages.KNOWN, typed(Known, self._on_known))

    def __len__(self) -> int:
        return len(self._members)

    def _way(self, place: Place) -> Way:
        return self._pipeline if place.cuts else self._context

    def part_of(self, place: Place) -> Part:
        """Raises RemoteError if this node cannot compute that part."""
        if (reason := self._common.worker.runner.why_whole) is not None:
            raise RemoteError(reason, "bad_request")
        if place.nodes[place.index] != self._common.channel.node_id:
            raise RemoteError(f"place {place.index} of {list(place.nodes)} is not for this node", "bad_request")
        return self._way(place).part_of(place)

    def add(self, request: Request, place: Place, transfer: KvTransfer | None) -> None:
        """The request, which has a part, joins the batcher now. `transfer`: to its decode node."""
        self._members[request.request_id] = Member(request, place, transfer)
        if not self._common.worker.batcher.blocks.prefix_caching:
            self.found(request)  # nothing is looked up

    # --- engine.core.worker.Parts

    def found(self, request: Request) -> None:
        member = self._members.get(request.request_id)
        if member is None or request.part is None or request.part.begun:
            return
        if member.place.index:
            known = encode(Known(member.id, request.num_computed))
            self._common.channel.post(member.place.nodes[0], messages.KNOWN, known)
        else:
            self._agree(member, 0, request.num_computed)

    def computed(self, row: ScheduledRow, begin: float, end: float, hidden: Tensor | None) -> None:
        member = self._members.get(row.request.request_id)
        if member is None:
            return
        member.compute_s += end - begin
        if not row.ends:
            member.pauses += 1
            return
        member.chunks += 1
        if not self._way(member.place).computed(member, row, hidden):
            return
        self._note(member, end)
        if not row.samples:
            self._common.spawn(self._sent_all(member))

    def _note(self, member: Member, end: float) -> None:
        """The last chunk is computed: record what this node did."""
        place = member.place
        self._common.metrics.count("mooncake:stages")
        detail = {
            "index": place.index,
            "nodes": list(place.nodes),
            "prefix_tokens": member.prefix,
            "chunks": member.chunks,
            "pauses": member.pauses,
            "compute_s": member.compute_s,
            "seconds": end - member.begun,  # from the agreement to the end of the last chunk
            "sent_bytes": member.sent_bytes,
        }
        member.request.journal.note(end, "stage", detail | self._way(place).detail(member))

    async def _sent_all(self, member: Member) -> None:
        """The part is owed until the nodes that need it have it."""
        errors = await asyncio.gather(*member.sending)
        self._all_computed(member.request, next((error for error in errors if error is not None), None))

    # --- the known prefix

    async def _on_known(self, peer: str, body: Known, data: memoryview) -> None:
        member = self._members.get(body.id)
        if member is not None and peer in member.place.nodes:
            self._agree(member, member.place.nodes.index(peer), body.tokens)

    def _agree(self, member: Member, index: int, tokens: int) -> None:
        """On the first node: when all prefixes are known, begin."""
        member.known[index] = tokens
        request = member.request
        if len(member.known) < len(member.place.nodes) or request.part is None or request.part.begun:
            return
        size = self._common.worker.batcher.block_size
        self._way(member.place).agreed(member, min(min(member.known.values()), request.num_computed) // size * size)

    # --- ends

    def end(self, request_id: str) -> None:
        """The request has ended here: what waits for it gets an error. Idempotent."""
        member = self._members.pop(request_id, None)
        if member is not None:
            self._way(member.place).end(member)
        self._common.inputs.pop(request_id, None)

    async def close(self) -> None:
        """End all of them, so that the running step waits for no other node."""
        for request_id in list(self._members):
            self.end(request_id)
            self._common.worker.abort(request_id)
        for task in self._common.tasks:
            task.cancel()
        await asyncio.gather(*self._common.tasks, return_exceptions=True)
