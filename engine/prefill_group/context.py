"""Context parallelism: each node computes all layers of some tokens, and the others' KV comes layer by layer.

    first node  ── the known prefix and the chunks ──> all nodes; who computes which chunk: sched/stripes.py
    node        ── KV of a layer of its chunk ──> every node with a later chunk, as soon as the layer has it

So the KV travels, and not the queries: each node then has all keys of its tokens in its own blocks, and computes its
rows with the same kernels as ever. Queries that travel would need parts of attention with their log-sum-exp from every
backend, and twice a message per layer. Each node sends to each other one; a ring would move the same bytes, later.

A chunk begins when all chunks before it have begun, which the first layer of their KV says. Then it only waits, inside
its step, for chunks that have begun, and these go before all other parts of their nodes: two groups on the same nodes
cannot wait for one another. All that a node gets lies in host memory until its own step puts it into blocks, so no
other node writes to the arena, and an end needs no fence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.prefill_group import messages
from engine.prefill_group.member import MAX_MESSAGE_BYTES, Common, Member
from engine.prefill_group.messages import Begin, Layer, Place
from engine.step.exchange import Exchange
from engine.step.hidden import to_bytes
from engine.step.layer_blocks import from_bytes, layer_bytes
from engine.step.part import Stripes
from engine.step.step import ScheduledRow
from net.bodies import encode, typed
from net.errors import PeerLost, PeerRefused, RemoteError
from sched.stripes import latest_start, stripe_sizes

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE_S = 60.0
"""Without a step here and without news from the other nodes, a member gives up."""


class Context:
    """The members on this node that compute some of the tokens; a Way (member.py)."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._exchanges: dict[str, asyncio.Future[Exchange]] = {}  # set when the chunks are known
        self._patience: dict[str, asyncio.TimerHandle] = {}
        common.channel.handle(messages.BEGIN, typed(Begin, self._on_begin))
        common.channel.handle(messages.LAYER, typed(Layer, self._on_layer))

    def part_of(self, place: Place) -> Stripes:
        pool, size = self._common.worker.runner.kv_pool, self._common.worker.batcher.block_size
        layers = self._common.worker.runner.model.config.num_layers
        blocks = MAX_MESSAGE_BYTES // layer_bytes(pool)
        return Stripes(0, layers, layers, size * max(1, blocks), index=place.index, nodes=len(place.nodes))

    # --- the begin

    def agreed(self, member: Member, tokens: int) -> None:
        request, worker, nodes = member.request, self._common.worker, member.place.nodes
        assert request.part is not None
        size, most = worker.batcher.block_size, min(request.part.most, worker.batcher.max_num_batched_tokens)
        try:
            start = min(tokens, latest_start(request.num_tokens, len(nodes), size))
        except ValueError as error:
            worker.fail(request, str(error))
            return
        layers, costs = request.part.num_layers, worker.costs.prefill.coefficients
        sizes = stripe_sizes(request.num_tokens, start, len(nodes), layers, costs, most, size)
        for node in nodes[1:]:
            self._common.channel.post(node, messages.BEGIN, encode(Begin(member.id, start, sizes)))
        self._begin(member, start, sizes)

    async def _on_begin(self, peer: str, body: Begin, data: memoryview) -> None:
        member = self._common.members.get(body.id)
        if member is None or member.request.finished or member.place.cuts or peer != member.place.nodes[0]:
            return
        request, size = member.request, self._common.worker.batcher.block_size
        whole = body.prefix % size == 0 and all(count > 0 and count % size == 0 for count in body.sizes[:-1])
        fits = body.prefix + sum(body.sizes) == request.num_tokens and len(body.sizes) >= len(member.place.nodes)
        if not (whole and fits and body.sizes[-1] > 0 and 0 <= body.prefix <= request.num_computed):
            self._common.worker.fail(request, f"{peer} divides the prompt behind {body.prefix} into {list(body.sizes)}")
        elif request.part is not None and not request.part.begun:
            self._begin(member, body.prefix, body.sizes)

    def _begin(self, member: Member, prefix: int, sizes: Sequence[int]) -> None:
        request, worker = member.request, self._common.worker
        part = request.part
        assert isinstance(part, Stripes)
        member.prefix, member.begun = prefix, time.monotonic()
        worker.batcher.begin_part(request, prefix, sizes)
        if member.transfer is not None:
            self._divide(member, part)
        exchange = Exchange(part, lambda layer, row, blocks: self._give(member, layer, row, blocks))
        self._common.inputs[member.id] = exchange
        self._exchange(member).set_result(exchange)
        self._news(member)
        self._advance(member, exchange)

    def _divide(self, member: Member, part: Stripes) -> None:
        """To the decode node, each node sends the KV of its chunks; the one with the first chunk, the prefix too."""
        assert member.transfer is not None
        size = self._common.worker.batcher.block_size
        own = part.chunks_of(part.index)
        if own[0][0] == member.prefix:
            own = [(0, own[0][1]), *own[1:]]
        mine = {block for begin, end in own for block in range(begin // size, -(-end // size))}
        every = range(-(-member.request.num_tokens // size))
        member.transfer.leave_out([block for block in every if block not in mine], own[-1][1])

    def _exchange(self, member: Member) -> asyncio.Future[Exchange]:
        if member.id not in self._exchanges:
            self._exchanges[member.id] = asyncio.get_running_loop().create_future()
        return self._exchanges[member.id]

    # --- between steps

    def computed(self, member: Member, row: ScheduledRow, hidden: Tensor | None) -> bool:
        part, done = member.request.part, row.start + row.num_tokens
        assert isinstance(part, Stripes)
        if done == part.stop(member.request.num_tokens):
            self._quiet(member)
            return True
        self._news(member)
        exchange = self._common.inputs.get(member.id)
        if isinstance(exchange, Exchange):
            self._advance(member, exchange)
        return False

    def _advance(self, member: Member, exchange: Exchange) -> None:
        """The next chunk begins when all chunks before it have."""
        request, worker = member.request, self._common.worker
        part = request.part
        assert isinstance(part, Stripes)
        if request.finished or part.lost or worker.batcher.in_step(request):
            return
        begin = part.next_begin(request.num_computed)
        if part.room(request.num_computed) == 0 and begin is not None and exchange.begun_before(begin):
            worker.batcher.skip_to(request, begin)
        worker.wake()

    def detail(self, member: Member) -> dict[str, Any]:
        exchange, part = self._common.inputs.get(member.id), member.request.part
        assert isinstance(part, Stripes)
        waited_s = exchange.waited_s if isinstance(exchange, Exchange) else 0.0
        return {"tokens": sum(end - begin for begin, end in part.chunks_of(part.index)), "waited_s": waited_s}

    # --- KV of other nodes

    def _give(self, member: Member, layer: int, row: ScheduledRow, blocks: Tensor | None) -> None:
        """This node has computed a layer of a chunk, which is news: send it to the nodes that need it, if any does."""
        exchange = self._common.inputs.get(member.id)
        if not isinstance(exchange, Exchange):
            return  # the request has ended
        self._news(member)
        if blocks is None:
            return
        data, body = to_bytes(blocks), encode(Layer(member.id, layer, row.start, row.num_tokens))
        for i, node in enumerate(member.place.nodes):
            if exchange.needs(i, row.start + row.num_tokens):
                self._common.sent(member, data)
                member.sending.append(self._common.spawn(self._send(member, node, body, data)))
        member.sending = [
            one for one in member.sending if not one.done() or one.cancelled() or one.result() is not None
        ]

    async def _send(self, member: Member, node: str, body: dict[str, Any], data: memoryview) -> str | None:
        """Returns the reason why `node` will not compute its part, if there is one."""
        try:
            await self._common.channel.call(node, messages.LAYER, body, [data], PATIENCE_S)
        except (PeerLost, PeerRefused, RemoteError, TimeoutError) as error:
            reason = f"the node of its group {node} failed: {error}"
            self._common.worker.fail(member.request, reason)
            return reason
        return None

    async def _on_layer(self, peer: str, body: Layer, data: memoryview) -> None:
        """Raises RemoteError if the request has ended."""
        member = self._common.members.get(body.id)
        if member is None or member.request.finished or member.place.cuts:
            raise RemoteError("the request has ended on a node of its group", "gone")
        if peer not in member.place.nodes:
            raise RemoteError(f"{peer} is not of the group", "bad_request")
        exchange = await asyncio.shield(self._exchange(member))
        worker = self._common.worker
        size = worker.batcher.block_size
        blocks = -(-(body.start + body.count) // size) - body.start // size
        try:
            arrived = from_bytes(worker.runner.kv_pool, data, blocks)
            exchange.add(member.place.nodes.index(peer), body.layer, body.start, body.count, arrived)
        except ValueError as error:
            raise RemoteError(str(error), "bad_request") from None
        self._news(member)
        if body.layer == 0:
            self._advance(member, exchange)

    # --- ends

    def _news(self, member: Member) -> None:
        """Something has happened: wait for the next news."""
        self._quiet(member)
        if not member.request.finished:
            loop = asyncio.get_running_loop()
            self._patience[member.id] = loop.call_later(PATIENCE_S, self._give_up, member)

    def _quiet(self, member: Member) -> None:
        if (timer := self._patience.pop(member.id, None)) is not None:
            timer.cancel()

    def _give_up(self, member: Member) -> None:
        self._common.worker.fail(member.request, f"nothing came from its group for {PATIENCE_S:g} s")

    def end(self, member: Member) -> None:
        self._quiet(member)
        coming = self._exchanges.pop(member.id, None)
        if coming is not None and not coming.done():
            coming.set_exception(RemoteError("the request has ended on a node of its group", "gone"))
            coming.exception()  # nobody may wait for it
        if isinstance(exchange := self._common.inputs.get(member.id), Exchange):
            exchange.end()
