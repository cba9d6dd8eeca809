"""The blocks of one request on other nodes, and what is asked about them (engine/beyond/elsewhere.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from attention.parts import Part
from cache.block import BlockGeometry, BlockKey
from engine.beyond import messages
from engine.beyond.messages import Ask, Parted, Store
from engine.step.cold import PartLate, PartLost
from engine.step.hidden import to_bytes
from net.bodies import answered, encode
from net.channel.channel import Channel, PeerLost, PeerRefused, RemoteError
from net.metrics.events import Metrics
from sched.cost import Regression
from sched.elsewhere import deadline_s, soon_s

ERRORS = (RemoteError, PeerLost, PeerRefused, TimeoutError)

STORE_S = 10.0
"""Deadline of a copy."""

MOST_BYTES = 32 << 20
"""Of one message with queries or parts."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The queries of a model."""

    num_heads: int
    head_size: int
    item_bytes: int

    @property
    def query_bytes(self) -> int:
        """One token in one layer."""
        return self.num_heads * self.head_size * self.item_bytes

    @property
    def part_bytes(self) -> int:
        """Output and log-sum-exp in float32."""
        return self.num_heads * (self.head_size + 1) * 4


@dataclass(slots=True)
class Done:
    """What has been asked of other nodes so far."""

    asks: int = 0
    query_bytes: int = 0
    part_bytes: int = 0
    stored: int = 0  # blocks
    holders_s: float = 0.0  # of computation there
    late: int = 0  # steps that went on without a request
    fallbacks: int = 0  # requests whose holder was lost


class Link:
    """What is known of one holder: a line through the seconds of its asks."""

    def __init__(self, ask_s: float, link_bytes_per_s: float, bytes_per_s: float) -> None:
        self.link_bytes_per_s = link_bytes_per_s
        self.asks = Regression((ask_s, 1 / bytes_per_s))

    @property
    def ask_s(self) -> float:
        return self.asks.coefficients[0]

    @property
    def bytes_per_s(self) -> float:
        return 1 / max(self.asks.coefficients[1], 1e-15)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The blocks of one request on one holder: those from `begin` on of all that it has elsewhere."""

    node: str
    number: int
    begin: int
    blocks: int
    found: int  # leading ones that were there
    link: Link


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked about one layer; the answers of each lease."""

    layer: int
    count: int  # blocks
    q: Tensor
    answers: Sequence[Sequence[Future[Part]]]
    soon_s: float

    def same(self, layer: int, q: Tensor, count: int) -> bool:
        return (self.layer, self.count) == (layer, count) and torch.equal(self.q, q)


class Asking(Protocol):
    """The asking side of a node, as held blocks use it."""

    geometry: BlockGeometry
    heads: Heads
    channel: Channel
    metrics: Metrics
    done: Done

    def ended(self, held: HeldBlocks) -> None:
        """Give its leases back."""

    def fell_back(self, reason: str) -> None:
        """A request has lost a holder."""


class HeldBlocks:
    """The blocks of one request on other nodes, numbered 0, 1, ... in their order. `store` and `ask` are called in the
    engine thread, everything else on the event loop."""

    def __init__(self, elsewhere: Asking, leases: Sequence[HeldLease], named: bool) -> None:
        self.leases, self._named = leases, named
        self._elsewhere, self._loop = elsewhere, asyncio.get_running_loop()
        self._stores: list[Future[None]] = []
        self._late: Asked | None = None
        self._lost = ""  # why

    def __len__(self) -> int:
        return sum(lease.blocks for lease in self.leases)

    @property
    def known(self) -> int:
        """Leading blocks that the holders had already."""
        known = 0
        for lease in self.leases:
            known += lease.found
            if lease.found < lease.blocks:
                break
        return known

    def store(self, number: int, block: memoryview, checksum: int, key: BlockKey) -> None:
        """Send a copy of a whole block, unless the holder has had it already; the next ask raises if it does not
        arrive."""
        lease = next(one for one in self.leases if one.begin <= number < one.begin + one.blocks)
        if number - lease.begin < lease.found:
            return
        body = Store(lease.number, number - lease.begin, checksum, key if self._named else b"")
        self._stores.append(self._run(self._stored(lease, body, bytes(block))))

    def ask(self, layer: int, q: Tensor, count: int, scale: float, soft_cap: float) -> Callable[[], Iterable[Part]]:
        """Send queries [T, num_heads, head_size] about the first `count` blocks; see engine.step.cold.Pieces.ask."""
        if self._lost:
            raise PartLost(self._lost)
        if self._late is not None and self._late.same(layer, q, count):
            return partial(self._answers, self._late)
        heads, q = self._elsewhere.heads, q.clone()  # it may still be on its way when the model goes on
        rows = max(1, MOST_BYTES // max(heads.query_bytes, heads.part_bytes))
        asked, patience_s = list[list[Future[Part]]](), 0.0
        for lease in self.leases:
            blocks = min(count - lease.begin, lease.blocks)
            if blocks > 0:
                dtype = str(q.dtype).removeprefix("torch.")
                nbytes = blocks * self._elsewhere.geometry.layer_bytes
                patience_s = max(patience_s, soon_s(len(q), nbytes, lease.link.ask_s, lease.link.bytes_per_s))
                asked.append(
                    [
                        self._run(
                            self._part(
                                lease,
                                Ask(lease.number, layer, blocks, len(some), q.shape[1], dtype, scale, soft_cap),
                                to_bytes(some),
                            )
                        )
                        for some in q.split(rows)
                    ]
                )
        return partial(self._answers, Asked(layer, count, q, asked, patience_s))

    def _answers(self, asked: Asked) -> Iterator[Part]:
        coming: list[Future[Any]] = [*self._stores, *(one for of_lease in asked.answers for one in of_lease)]
        if wait(coming, asked.soon_s).not_done:
            self._late = asked
            self._elsewhere.done.late += 1
            raise PartLate(asked.layer, partial(_then, coming))
        stores, self._stores = self._stores, []
        if self._late is asked:
            self._late = None
        for store in stores:
            _result(store)
        for of_lease in asked.answers:
            outs, lses = zip(*map(_result, of_lease), strict=True)
            yield (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _stored(self, lease: HeldLease, body: Store, block: bytes) -> None:
        await self._call(lease, messages.STORE, body, block, STORE_S)
        self._elsewhere.done.stored += 1

    async def _part(self, lease: HeldLease, body: Ask, queries: memoryview) -> Part:
        elsewhere = self._elsewhere
        heads, nbytes = elsewhere.heads, body.blocks * elsewhere.geometry.layer_bytes
        begin = time.perf_counter()
        patience_s = deadline_s(body.rows, nbytes, lease.link.bytes_per_s)
        reply, data = await self._call(lease, messages.PART, body, queries, patience_s)
        seconds = time.perf_counter() - begin
        if len(data) != body.rows * heads.part_bytes:
            raise self._gone(lease, f"its part has {len(data)} bytes")
        try:
            elsewhere.done.holders_s += answered(Parted, reply).seconds
        except RemoteError as error:
            raise self._gone(lease, str(error)) from None
        if body.rows == 1:
            lease.link.asks.observe((1.0, float(nbytes)), seconds)
        elsewhere.done.asks += 1
        elsewhere.done.query_bytes += len(queries)
        elsewhere.done.part_bytes += len(data)
        elsewhere.metrics.count("mooncake:attention_asks")
        elsewhere.metrics.count("mooncake:attention_asked_bytes", len(queries), direction="queries")
        elsewhere.metrics.count("mooncake:attention_asked_bytes", len(data), direction="parts")
        values = torch.frombuffer(data, dtype=torch.float32)
        border = body.rows * heads.num_heads * heads.head_size
        out = values[:border].view(body.rows, heads.num_heads, heads.head_size)
        return out, values[border:].view(body.rows, heads.num_heads)

    async def _call(
        self, lease: HeldLease, kind: str, body: Any, data: Any, timeout_s: float
    ) -> tuple[dict[str, Any], memoryview]:
        """Raises PartLost."""
        try:
            return await self._elsewhere.channel.call(lease.node, kind, encode(body), [data], timeout_s=timeout_s)
        except ERRORS as error:
            raise self._gone(lease, str(error)) from None

    def _gone(self, lease: HeldLease, reason: str) -> PartLost:
        found = f"{lease.node} does not answer for {lease.blocks} blocks that it holds: {reason}"
        if not self._lost:
            self._lost = found
            self._elsewhere.fell_back(found)
        return PartLost(found)

    def close(self) -> None:
        """Give all leases back. Idempotent. What is still asked counts as no fallback."""
        self._lost = self._lost or "the request has ended"
        self._elsewhere.ended(self)


def _then(futures: Sequence[Future[Any]], call: Callable[[], object]) -> None:
    """`call()` when all of these are done."""
    coming, lock = {id(future) for future in futures}, Lock()

    def done(future: Future[Any]) -> None:
        with lock:
            coming.discard(id(future))
            last = not coming
        if last:
            call()

    for future in futures:
        future.add_done_callback(done)


def _result(future: Future[Any]) -> Any:
    """Raises PartLost. The deadline is the call's own."""
    try:
        return future.result()
    except CancelledError:
        raise PartLost("this node is closing") from None
