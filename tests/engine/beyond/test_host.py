"""A node that takes requests beyond memory: what it measures at its start, and when it takes none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention.codes import pool_in
from cache.arena import Arena
from cache.block import BlockGeometry
from cache.ssd import SsdTier
from cache.tiers.local_store import LocalStore
from engine.beyond.host import MEASURED_KEYS, Host
from engine.beyond.messages import FORESEE, Foresee
from engine.config.config import Config
from engine.core.costs import StepCosts
from net.bodies import encode
from net.errors import RemoteError
from net.transfer.common.memory import Region
from sched.beyond import ColdSteps
from tests.engine.handoff.test_service import Wires
from tests.engine.tiny_llama import BLOCK_SIZE, runner, tiny

GEOMETRY = BlockGeometry(3, 2, 32, BLOCK_SIZE, "float32")
BLOCKS = 16


class Here(SimpleNamespace):
    """A host, its SSD tier and its channel, and whether it leaves."""

    async def calibrate(self) -> int:
        async def in_thread(work: Any) -> int:
            return await asyncio.to_thread(work)

        found: int = await self.host.calibrate(in_thread, self.runner, range(BLOCKS))
        return found

    def check(self) -> None:
        if self.leaves:
            raise RemoteError("it leaves", "draining")


@asynccontextmanager
async def host(path: Path) -> AsyncIterator[Here]:
    arena, dram = (Region.private(name, BLOCKS * GEOMETRY.block_bytes) for name in ("kv", "dram"))
    ssd = SsdTier(path, GEOMETRY.block_bytes, 4 << 20, b"r" * 16)
    share = LocalStore(Arena(dram, GEOMETRY.block_bytes), ssd)
    config = Config(
        beyond_memory="on",
        device="cpu",
        kv_cache_bytes=arena.nbytes,
        dram_bytes=dram.nbytes,
        ssd_path=str(path),
        ssd_bytes=4 << 20,
        max_num_batched_tokens=64,
        node_id="n",
    )
    here = Here(ssd=ssd, share=share, channel=Wires(), leaves=False, runner=runner(tiny(), num_blocks=BLOCKS))
    here.runner.kv_pool = pool_in(torch.from_numpy(np.frombuffer(arena.memory, np.uint8)), GEOMETRY.shape, "float32")
    batcher = SimpleNamespace(requests={})
    store: Any = SimpleNamespace(local=share)
    here.host = Host(config, GEOMETRY, arena, store, batcher, StepCosts())  # type: ignore[arg-type]
    here.host.answer(here.channel, here.check)
    try:
        yield here
    finally:
        here.host.close()
        await share.close()


async def test_it_measures_both_tiers_and_leaves_nothing_behind(tmp_path):
    async with host(tmp_path) as here:
        assert await here.calibrate() == 5
        assert here.host.dram_bytes_per_s > 0 and here.host.ssd_bytes_per_s > 0
        assert here.host.steps.regression.observations == 5
        assert not any(map(here.ssd.contains, MEASURED_KEYS)) and here.ssd.stats()["held"] == 0
        assert here.share.stats()["dram"]["held"] == 0


async def test_a_forecast_has_what_is_between_two_steps(tmp_path):
    async with host(tmp_path) as here:
        alone = here.host.forecast(300, 10, 0).token_s
        served = here.host._costs.served
        for i in range(64):
            served.decoded(["r"], 3 * alone * i, alone, 1)
        assert here.host.forecast(300, 10, 0).token_s == pytest.approx(3 * alone, rel=0.05)


async def test_a_disk_that_fails_leaves_the_prior(tmp_path, monkeypatch):
    async with host(tmp_path) as here:
        monkeypatch.setattr(here.ssd, "put", lambda *block: False)
        assert await here.calibrate() == 0
        assert here.host.steps.regression.coefficients == ColdSteps().regression.coefficients
        assert here.share.stats()["dram"]["held"] == 0 and here.ssd.stats()["held"] == 0


async def test_a_node_that_leaves_foresees_nothing(tmp_path):
    async with host(tmp_path) as here:
        ask = here.channel.handlers[FORESEE]
        body = encode(Foresee(300, 10, "batch"))
        reply = await ask("acceptor", body, memoryview(b""))
        assert reply["refused"] == "" and reply["prompt_s"] > 0
        here.leaves = True
        with pytest.raises(RemoteError, match="it leaves"):
            await ask("acceptor", body, memoryview(b""))
