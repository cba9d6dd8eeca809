"""Host: says whether this node can take a request whose KV exceeds its arena, and finds the request's room.

One such request has its room at a time; others wait for it in the queue (Batcher.loads). In the queue it counts as
class batch, so that requests which fit into the arena go first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from attention.codes import pool_in
from cache.block import KEY_BYTES, BlockGeometry, BlockKey
from cache.pool.policy import Facts
from cache.ssd import SsdError
from cache.store.calls import HOME_ERRORS
from cache.store.store import Store
from cache.tiers.local_store import NoSpace
from cache.tiers.lodging import Lodging
from engine.beyond.elsewhere import Elsewhere, NoRoomElsewhere
from engine.beyond.held import HeldBlocks
from engine.beyond.lodged import Done, Memory, RequestRoom
from engine.beyond.messages import FORESEE, Foresee, Foreseen
from engine.beyond.window import Reader
from engine.config.beyond import beyond_room
from engine.config.config import Config
from engine.core.batcher import Batcher
from engine.core.costs import StepCosts
from engine.core.priority import step_back
from engine.handoff.messages import split_keys
from engine.step.cold import Cold
from engine.step.inputs import Row
from engine.step.request import Request
from net.bodies import typed
from net.channel.channel import Channel
from net.transfer.common.memory import Region
from sched.beyond import ColdSteps, Forecast, forecast, no_room, too_slow
from sched.classes import BATCH
from sched.elsewhere import Job, Own, Split, room_with, with_asks

if TYPE_CHECKING:
    from engine.step.runner import Runner

log = logging.getLogger("mooncake.engine")

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]
"""Runs in the engine thread, between two steps."""

TRIES = 4
"""Steps of each kind; the fastest counts. The first one also allocates buffers, and others may use the machine."""

SHARES = (8, 2, 1)
"""The calibration measures steps over one eighth, one half and all of its slots."""

MEASURED_BYTES, MEASURED_SSD_BYTES = 64 << 20, 16 << 20
"""Cold bytes in DRAM and on SSD of the largest steps of the calibration."""

MEASURED_KEYS = [blake2b(b"%d" % i, digest_size=KEY_BYTES, person=b"mooncake-measure").digest() for i in range(64)]
"""Of the blocks that the calibration writes to SSD, and removes."""

ROOM_S, ROOM_INTERVAL_S = 10.0, 0.05
"""How long a request waits for room that others hold, and between two tries."""

FACTS = Facts(service_class=BATCH.name)


class Host:
    """The requests beyond memory of one node."""

    def __init__(
        self,
        config: Config,
        geometry: BlockGeometry,
        arena: Region,
        store: Store,
        batcher: Batcher,
        costs: StepCosts,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """arena: the engine's, on the CPU. store: with a share whose slots are blocks of the arena. elsewhere: asks
        other nodes."""
        found, share = beyond_room(config, geometry), store.local
        assert found is not None and share is not None, "checked when the flags were resolved"
        assert share.arena is not None
        self.room, self._elsewhere = found, elsewhere
        self._node_id, self._classes = config.node_id, config.classes
        self._store, self._share, self._batcher, self._costs = store, share, batcher, costs
        self._fetches, self._tier = config.prefix_fetch != "never", share.arena
        self._chunk_tokens = min(found.chunk_tokens, config.max_num_batched_tokens)
        tier, ours = (
            np.frombuffer(region.memory, np.uint8)[: region.nbytes // geometry.block_bytes * geometry.block_bytes]
            for region in (share.arena.region, arena)
        )
        near = pool_in(torch.from_numpy(tier), geometry.shape, geometry.dtype).flatten(0, 1)
        tier, ours = (rows.reshape(-1, geometry.layer_bytes) for rows in (tier, ours))
        self._reader = Reader(ours, geometry.num_layers, partial(step_back, config.engine_nice))
        self.memory = Memory(tier, ours, self._reader, near, config.block_checksums)
        self._check: Callable[[], None] = lambda: None
        self.steps = ColdSteps()
        self.done = Done()
        self.dram_bytes_per_s = self.ssd_bytes_per_s = 0.0  # measured at the start, without computation

    # --- before it is placed

    def answer(self, channel: Channel, check: Callable[[], None]) -> None:
        """Say from now on what a request would cost here. check: raises RemoteError while the node takes no new one."""
        self._check = check
        channel.handle(FORESEE, typed(Foresee, self._on_foresee))

    async def _on_foresee(self, peer: str, body: Foresee, data: memoryview) -> Foreseen:
        """Raises RemoteError if this node takes no new request now."""
        self._check()
        keys = split_keys(data)
        holders = [] if self._elsewhere is None else await self._elsewhere.holders()
        lent = sum(holder.blocks for holder in holders)
        if (reason := no_room(body.tokens, body.output, self.room, self._node_id, lent)) is not None:
            return Foreseen(reason)
        known = self._share.count_leading(keys) * self.room.block_size
        split = None
        if self._elsewhere is not None:
            split = self._elsewhere.divide(self._job(body.tokens, body.output, known), self._own(), holders)
            if split is not None and split.held:
                known = min(known, split.near * self.room.block_size)
        found = self.forecast(body.tokens, body.output, known, split)
        tbt_s = self._classes[body.service_class].tbt_s
        if (reason := too_slow(found, body.service_class, tbt_s, self._node_id)) is not None:
            return Foreseen(reason)
        return Foreseen("", known, found.cold_bytes, found.token_s, self._wait_s(), found.prompt_s)

    def forecast(self, tokens: int, output: int, known: int, split: Split | None = None) -> Forecast:
        """split: if blocks lie on other nodes too."""
        chunks = -(-(tokens - known) // self._chunk_tokens)
        prefill_s = self._costs.prefill.estimate(tokens - known, known, chunks)
        room = self.room if split is None else room_with(self.room, split)
        found = forecast(tokens, output, known, room, self.steps, prefill_s)
        if split is not None:
            found = with_asks(found, split, self.steps.read_s(found.near_bytes, found.far_bytes))
        return replace(found, token_s=self._costs.served.next_token_s(found.token_s))

    def _job(self, tokens: int, output: int, known: int) -> Job:
        assert self._elsewhere is not None
        heads, room = self._elsewhere.heads, self.room
        return Job(
            room.cold_of(tokens + output),
            tokens - known,
            output,
            self._chunk_tokens,
            self._reader.num_layers,
            room.block_bytes,
            heads.query_bytes + heads.part_bytes,
            known // room.block_size,
        )

    def _own(self) -> Own:
        near_s, far_s = self.steps.read_s(self.room.block_bytes, 0), self.steps.read_s(0, self.room.block_bytes)
        return Own(self.room.near_blocks, self.room.far_blocks, near_s, far_s)

    def _wait_s(self) -> float:
        """Seconds until the requests beyond memory that are here have their prompts computed; their answers take longer
        by an unknown time."""
        total = 0.0
        for request in self._batcher.requests.values():
            if request.cold is not None and request.num_uncomputed > 1:
                total += self.forecast(request.num_tokens, 0, request.num_computed).prompt_s
        return total

    # --- here

    def welcome(self, request: Request) -> None:
        """A request beyond memory has come: it waits for its room from now on."""
        self._batcher.goes_beyond(request, self._cold())
        self.done.requests += 1

    def _cold(self) -> Cold:
        return Cold(self.room.hot_blocks, self.room.window_blocks, self.room.block_size, self._reader.num_layers)

    async def open(self, request: Request) -> None:
        """Find the request's room in the tier; what the tier has of its prompt is not computed again. If there is none,
        `refused` of its Cold says why."""
        cold = request.cold
        if cold is None or cold.open or request.finished:
            return
        size = self.room.block_size
        output = request.sampling.max_tokens - request.num_output_tokens
        need = self.room.cold_of(request.num_tokens + output)
        keys: Sequence[BlockKey] = ()
        if self._batcher.blocks.prefix_caching and request.fetches:
            keys = request.block_keys(size)[: (request.num_tokens - 1) // size]
        near = min(need, self.room.near_blocks)
        split, held = Split(near, (), need - near), None
        if self._elsewhere is not None:
            try:
                split, held = await self._divided(self._elsewhere, request, keys, output)
            except NoRoomElsewhere as error:
                reason = no_room(request.num_tokens, output, self.room, self._node_id, error.lent)
                cold.refused = reason or str(error)
                return
        near = split.near
        try:
            lodging = await self._lodging(request, keys, near)
        except BaseException as error:
            if held is not None:
                held.close()
            if not isinstance(error, NoSpace):
                raise
            cold.refused = f"no room beyond the arena of {self._node_id}: {error}; raise --dram-bytes there"
            return
        far = self._share.lodge_on_ssd() if split.far else None
        here = RequestRoom(lodging, far, self.memory, self.steps, self.done, held)
        fetched = there = on_ssd = 0
        try:
            if not request.finished:
                fetched = await self._fetch(keys[len(lodging.found) : near], lodging.fresh)
            if not request.finished and len(lodging.found) + fetched == near:
                there = 0 if held is None else held.known
                if there == split.num_held:
                    on_ssd = await asyncio.to_thread(here.adopt, keys[near + there : need])
        except BaseException:
            here.close()
            raise
        if request.finished:
            here.close()
            return
        there_places = range(-1, -1 - split.num_held, -1)
        on_disk = range(self.memory.num_slots, self.memory.num_slots + split.far)
        places = [*lodging.found, *lodging.fresh, *there_places, *on_disk]
        count = len(lodging.found) + fetched + there + on_ssd
        self._batcher.blocks.lodge(request, here, places[:count], places[count:])
        known = count * size
        expected = self.forecast(request.num_tokens, output, known, split if split.held else None)
        request.journal.note(
            time.monotonic(),
            "beyond_memory",
            {
                "cold_blocks": need,
                "far_blocks": split.far,
                "held_blocks": dict(split.held),
                "known_tokens": known,
                "fetched_tokens": fetched * size,
                "hot_blocks": cold.hot_blocks,
                "near_bytes": expected.near_bytes,
                "far_bytes": expected.far_bytes,
                "token_s": expected.token_s,
                "prompt_s": expected.prompt_s,
            },
        )

    async def _divided(
        self, elsewhere: Elsewhere, request: Request, keys: Sequence[BlockKey], output: int
    ) -> tuple[Split, HeldBlocks]:
        """Where its blocks shall lie, and room for those on other nodes. Raises NoRoomElsewhere."""
        known = self._share.count_leading(keys) * self.room.block_size
        named = self._batcher.blocks.prefix_caching and not request.private
        return await elsewhere.lodge(self._job(request.num_tokens, output, known), self._own(), keys, named)

    async def calibrate(self, in_thread: InThread[int], runner: Runner, blocks: Sequence[int]) -> int:
        """Measure the tier, and decode steps over few and many cold blocks; returns the number of measured steps: 0 if
        the tier has no room or its disk fails, and then the prior stays. `blocks`: of the arena, which nobody uses
        now."""
        most = max(1, min(self._share.most_lodged, MEASURED_BYTES // self.room.block_bytes))
        try:
            lodging = await self._share.lodge((), most, FACTS)
        except NoSpace as error:  # writes to SSD from an earlier life
            log.info("no calibration beyond memory: %s", error)
            return 0
        far = self._share.lodge_on_ssd() if self.room.far_blocks else None
        here = RequestRoom(lodging, far, self.memory, self.steps, Done())
        try:
            return await in_thread(partial(self._calibrate, runner, blocks, here, lodging.fresh))
        except (OSError, SsdError) as error:
            log.warning("no calibration beyond memory, the SSD tier fails: %s", error)
            return 0
        finally:
            here.close()
            await self._share.remove(MEASURED_KEYS)

    def _calibrate(self, runner: Runner, blocks: Sequence[int], here: RequestRoom, slots: Sequence[int]) -> int:
        for slot in slots:  # touches its pages
            self.memory.store(blocks[0], slot)
        self.dram_bytes_per_s = self.memory.rate(slots, blocks[0])
        places = [[*slots[: max(1, len(slots) // share)]] for share in SHARES]
        if self.room.far_blocks:
            most = min(self.room.far_blocks, len(MEASURED_KEYS), max(1, MEASURED_SSD_BYTES // self.room.block_bytes))
            far = list(range(self.memory.num_slots, self.memory.num_slots + most))
            for place, key in zip(far, MEASURED_KEYS, strict=False):
                here.store(blocks[0], place, key)
            here.settle()
            self.ssd_bytes_per_s = here.rate(far, blocks[: self.room.window_blocks])
            places += [far[: max(1, most // 2)], far]
        for some in places:
            taken = [self._measured(runner, blocks, here, some) for _ in range(TRIES)]
            here.ran(1, some, 1, min(taken))
        return len(places)

    def _measured(self, runner: Runner, blocks: Sequence[int], here: RequestRoom, places: Sequence[int]) -> float:
        """Seconds of a decode step over the cold blocks in these places."""
        cold = self._cold()
        cold.lodge(here, places, ())
        cold.seat(blocks[: self.room.arena_blocks])
        runner.step_beyond(Row([1], cold.cold_tokens, ()), cold, range(cold.num_layers))
        return cold.spent_s

    async def _lodging(self, request: Request, keys: Sequence[BlockKey], count: int) -> Lodging:
        """Room in DRAM; others may hold it for a moment, until their blocks are on SSD. Raises NoSpace."""
        deadline = time.monotonic() + ROOM_S
        while True:
            try:
                return await self._share.lodge(keys, count, FACTS)
            except NoSpace:
                if request.finished or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(ROOM_INTERVAL_S)

    async def _fetch(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> int:
        """Read the leading run of `keys` that other nodes' shares have into `slots`; returns its length."""
        if not keys or not self._fetches:
            return 0
        offsets = [self._tier.slot_span(slot)[0] for slot in slots[: len(keys)]]
        try:
            found = await self._store.get_into(keys, self._tier.name, offsets)
        except HOME_ERRORS as error:
            log.info("the prefix of a request beyond memory could not be fetched: %r", error)
            return 0
        return found.blocks

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        return {
            "room": asdict(self.room),
            "done": asdict(self.done),
            "bytes_read": self._reader.nbytes,
            "read_s": self._reader.seconds,
            "dram_bytes_per_s": self.dram_bytes_per_s,
            "ssd_bytes_per_s": self.ssd_bytes_per_s,
            "coefficients": self.steps.regression.coefficients,
            "elsewhere": None if self._elsewhere is None else self._elsewhere.state(),
        }

    def close(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._reader.close()
        del self.memory  # it keeps both arenas mapped
