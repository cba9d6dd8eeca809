"""Holder: lends room in this node's DRAM share to requests of other nodes, and attends to their blocks when asked.

Attention runs in one thread of its own, at the engine's lower priority: a step of this node shares the cores with one
part at a time, and the event loop goes before both. A store node computes too, and loads torch for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.choice.choose import made
from attention.codes import pool_in
from attention.cpu.backend import check_head_size
from attention.parts import Part, PartBackend, Parts
from cache.arena import UNCHECKED, checksum
from cache.block import BlockGeometry
from cache.pool.policy import Facts
from cache.tiers.local_store import LocalStore, NoSpace
from cache.tiers.lodging import Lodging
from engine.beyond import messages
from engine.beyond.leases import Lease, Leases, LeasesFull, NoLease
from engine.beyond.messages import NOT_HELD, Ask, LeaseNumbers, Lend, Lent, Offer, Offered, Parted, Store
from engine.config.config import Config
from engine.core.priority import step_back
from engine.handoff.messages import split_keys
from engine.step.hidden import to_bytes
from engine.step.split_attention import over_blocks
from net.bodies import typed
from net.channel.channel import Channel
from net.errors import RemoteError
from sched.classes import BATCH
from sched.membership.member import Member

log = logging.getLogger("mooncake.engine")

FACTS = Facts(service_class=BATCH.name)

LONGEST_ANSWER = 16 << 20
"""Bytes that an offer brings back at most."""

MEASURED_BYTES, TRIES = 16 << 20, 4
"""Of keys and values in one layer, over which the rate is measured at the start; the fastest try counts."""

LEARNT_BYTES, LEARNING = 1 << 16, 0.1
"""An ask over fewer bytes says nothing of the rate; weight of each other one."""

SOONEST_S = 1.0
"""Between two looks for leases that have run out."""


@dataclass(slots=True)
class Held:
    """The slots of one lease."""

    lodging: Lodging
    slots: list[int]
    filled: int  # leading ones with a block


class Holder:
    """The leases of one node."""

    def __init__(
        self, config: Config, geometry: BlockGeometry, num_heads: int, share: LocalStore, channel: Channel
    ) -> None:
        """geometry: of plain blocks with K and V. num_heads: of the model's queries. share: with DRAM."""
        assert share.arena is not None
        self._geometry, self._num_heads, self._share, self._channel = geometry, num_heads, share, channel
        memory = np.frombuffer(share.arena.region.memory, np.uint8)[: share.arena.num_slots * geometry.block_bytes]
        pool = pool_in(torch.from_numpy(memory), geometry.shape, geometry.dtype)
        self._layers = pool.flatten(0, 1)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._backend = _backend(config, geometry.head_size)
        threads = None if {"prefill", "decode"} & set(config.roles) else config.num_threads  # those of the model
        self._thread = ThreadPoolExecutor(1, "held-attention", partial(_begin, threads, config.engine_nice))
        self.leases = Leases(share.most_lodged)
        self._held: dict[Lease, Held] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_per_s = 1e9
        self.asks = 0
        self.seconds = 0.0  # of computation

    async def start(self, on_down: Callable[[Callable[[Member, str], None]], None]) -> None:
        """Measure, and lend from now on. on_down: calls back when a node is lost."""
        await self._measure()
        on_down(lambda member, reason: self._free(self.leases.lost(member.node_id)))
        channel = self._channel
        channel.handle(messages.OFFER, typed(Offer, self._on_offer))
        channel.handle(messages.LEND, typed(Lend, self._on_lend))
        channel.handle(messages.STORE, typed(Store, self._on_store))
        channel.handle(messages.PART, typed(Ask, self._on_part))
        channel.handle(messages.KEEP, typed(LeaseNumbers, self._on_keep))
        channel.handle(messages.RELEASE, typed(LeaseNumbers, self._on_release))

    async def _measure(self) -> None:
        most = max(1, min(self._share.most_lodged, MEASURED_BYTES // self._geometry.layer_bytes))
        try:
            lodging = await self._share.lodge((), most, FACTS)
        except NoSpace as error:  # writes to SSD from an earlier life
            log.info("attention over lent blocks is not measured, %.3g bytes/s assumed: %s", self.bytes_per_s, error)
            return
        try:
            q = torch.zeros(1, self._num_heads, self._geometry.head_size, dtype=self._dtype)
            attend = partial(self._attend, lodging.fresh, 0, q, 1.0, 0.0)
            loop = asyncio.get_running_loop()
            taken = [(await loop.run_in_executor(self._thread, attend))[1] for _ in range(TRIES)]
            self.bytes_per_s = len(lodging.fresh) * self._geometry.layer_bytes / min(taken)
        finally:
            lodging.close()

    # --- what owners ask

    async def _on_offer(self, peer: str, body: Offer, data: memoryview) -> tuple[Offered, Sequence[bytes]]:
        offered = Offered(self.leases.left, self.bytes_per_s)
        return offered, [bytes(max(0, min(body.answer_bytes, LONGEST_ANSWER)))]

    async def _on_lend(self, peer: str, body: Lend, data: memoryview) -> Lent:
        try:
            lease = self.leases.grant(peer, body.lease, body.blocks, time.monotonic())
        except (LeasesFull, ValueError) as error:
            raise RemoteError(str(error), NOT_HELD) from None
        try:
            lodging = await self._share.lodge(split_keys(data), body.blocks, FACTS)
        except BaseException as error:
            self._free(self.leases.release(peer, [body.lease]))
            if isinstance(error, NoSpace):
                raise RemoteError(str(error), NOT_HELD) from None
            raise
        if lease.ended:
            lodging.close()
            raise RemoteError(f"the lease of {peer} ended before it began", NOT_HELD)
        self._held[lease] = Held(lodging, [*lodging.found, *lodging.fresh], len(lodging.found))
        self._look_again()
        return Lent(len(lodging.found))

    async def _on_store(self, peer: str, body: Store, data: memoryview) -> None:
        """Runs to its end before an ask that was sent later begins."""
        lease, held = self._use(peer, body.lease)
        try:
            if body.place != held.filled or body.place >= len(held.slots):
                raise RemoteError(f"block {body.place} comes where block {held.filled} is the next one", "bad_request")
            assert self._share.arena is not None
            slot = held.slots[body.place]
            memory = self._share.arena.memory(slot)
            if len(data) != self._geometry.block_bytes:
                raise RemoteError(f"{len(data)} bytes are no block", "bad_request")
            memory[: len(data)] = data
            if body.checksum != UNCHECKED and checksum(memory[: len(data)]) != body.checksum:
                raise RemoteError(f"block {body.place} arrived damaged", "damaged")
            held.filled += 1
            if body.key:
                held.lodging.name(body.key, slot, body.checksum, FACTS)
        finally:
            self._free(self.leases.done(lease))

    async def _on_part(self, peer: str, body: Ask, data: memoryview) -> tuple[Parted, Sequence[memoryview]]:
        lease, held = self._use(peer, body.lease)
        try:
            slots, q = held.slots[: body.blocks], self._queries(body, data)
            if body.blocks > held.filled or body.layer >= self._geometry.num_layers:
                raise RemoteError(f"layer {body.layer} of {body.blocks} blocks is not here", "bad_request")
            attend = partial(self._attend, slots, body.layer, q, body.scale, body.soft_cap)
            (out, lse), seconds = await asyncio.get_running_loop().run_in_executor(self._thread, attend)
        finally:
            self._free(self.leases.done(lease))
        self.asks += 1
        self.seconds += seconds
        nbytes = body.blocks * self._geometry.layer_bytes
        if body.rows == 1 and nbytes >= LEARNT_BYTES:
            self.bytes_per_s += LEARNING * (nbytes / seconds - self.bytes_per_s)
        return Parted(seconds), [to_bytes(out), to_bytes(lse)]

    async def _on_keep(self, peer: str, body: LeaseNumbers, data: memoryview) -> None:
        self.leases.keep(peer, body.leases, time.monotonic())

    async def _on_release(self, peer: str, body: LeaseNumbers, data: memoryview) -> None:
        self._free(self.leases.release(peer, body.leases))

    def _use(self, peer: str, number: int) -> tuple[Lease, Held]:
        try:
            lease = self.leases.use(peer, number, time.monotonic())
        except NoLease as error:
            raise RemoteError(error.args[0], NOT_HELD) from None
        held = self._held.get(lease)
        if held is None:
            self._free(self.leases.done(lease))
            raise RemoteError(f"lease {number} has not begun", NOT_HELD)
        return lease, held

    def _queries(self, body: Ask, data: memoryview) -> Tensor:
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(body.dtype)
        shape = body.rows, body.heads, self._geometry.head_size
        if dtype is None or body.heads % self._geometry.num_kv_heads:
            raise RemoteError(f"no queries of {body.heads} heads in {body.dtype}", "bad_request")
        if len(data) != body.rows * body.heads * self._geometry.head_size * dtype.itemsize:
            raise RemoteError(f"{len(data)} bytes are not {list(shape)} in {body.dtype}", "bad_request")
        return torch.frombuffer(data, dtype=dtype).view(shape)

    # --- in the thread

    def _attend(self, slots: Sequence[int], layer: int, q: Tensor, scale: float, soft_cap: float) -> tuple[Part, float]:
        """(part over these slots, seconds)"""
        begin = time.perf_counter()
        places = np.array(slots, dtype=np.int32) * np.int32(self._geometry.num_layers) + np.int32(layer)
        parts = Parts()
        for part in over_blocks(self._backend, q, self._layers, places, scale, soft_cap):
            parts.add(part)
        return parts.part(), time.perf_counter() - begin

    # --- the ends of leases

    def _free(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            held = self._held.pop(lease, None)
            if held is not None:
                held.lodging.close()

    def _look_again(self) -> None:
        """When the next lease may have run out."""
        end = self.leases.next_end()
        if end is not None and self._timer is None:
            pause = max(SOONEST_S, end - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        self._timer = None
        self._free(self.leases.expire(time.monotonic()))
        self._look_again()

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        return {
            "leases": len(self.leases),
            "lent": self.leases.lent,
            "most": self.leases.most,
            "expired": self.leases.expired,
            "bytes_per_s": self.bytes_per_s,
            "asks": self.asks,
            "seconds": self.seconds,
        }

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._thread.shutdown)
        for held in self._held.values():
            held.lodging.close()
        self._held.clear()
        del self._layers  # it keeps the share mapped


def _begin(threads: int | None, nice: int) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    step_back(nice)


def _backend(config: Config, head_size: int) -> PartBackend | None:
    """One of its own: kernels keep the arguments of their last call. None: torch."""
    if config.attention_backend not in ("auto", "cpu"):
        return None
    try:
        check_head_size(head_size)
        backend = made("cpu", config.cpu_level)
    except ValueError as error:
        log.info("lent blocks by torch: %s", error)
        return None
    return backend if isinstance(backend, PartBackend) else None
