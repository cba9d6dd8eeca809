"""The engine loop of a prefill, decode or mixed node: schedule, compute in one thread, commit, repeat.

The batcher decides and the runner computes; this shell owns the clock, the executor thread and the background
movement of blocks: prefix loads before a request starts, KV to the decode node while it computes, publishing after.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.batcher import Batcher
from engine.costs import StepCosts
from engine.kv_transfer import KvTransfer
from engine.request import Request, RequestState, TokenLogprobs
from engine.reuse import PrefixLoader, Publisher
from engine.runner import Row, Runner
from engine.sampler import Sampled, SamplingRow
from engine.step import Step
from net.metrics import Metrics

log = logging.getLogger("mooncake.engine")

MAX_LOADS_IN_FLIGHT = 4
BLOCKED_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Emission:
    """One token of one request, or its end without a token (token_id None)."""

    request: Request
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Worker:
    """Runs steps until closed. Set `on_emissions` before `start`: it receives what each step produced, in one call,
    on the event loop."""

    def __init__(
        self,
        batcher: Batcher,
        runner: Runner,
        loader: PrefixLoader,
        publisher: Publisher,
        costs: StepCosts,
        metrics: Metrics,
    ) -> None:
        self.batcher = batcher
        self.runner = runner
        self.costs = costs
        self._loader = loader
        self._publisher = publisher
        self._metrics = metrics
        self.on_emissions: Callable[[Sequence[Emission]], None] = lambda emissions: None
        self._transfers: dict[str, KvTransfer] = {}
        self._preemptions_seen = 0
        self._wake = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loads: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None

    # --- requests

    def add(self, request: Request, transfer: KvTransfer | None = None) -> None:
        """Queue a request; its KV leaves through `transfer` while it is computed."""
        self.batcher.add(time.monotonic(), request)
        if transfer is not None:
            self._transfers[request.request_id] = transfer
        self.wake()

    def wake(self) -> None:
        """Something changed that may make a request runnable."""
        self._wake.set()

    def abort(self, request_id: str) -> Request | None:
        """End a request; its transfer, if any, is left to the caller of `take_transfer`."""
        request = self.batcher.abort(time.monotonic(), request_id)
        if request is not None:
            self.wake()
        return request

    def take_transfer(self, request_id: str) -> KvTransfer | None:
        """Hand over the transfer of a request that has ended."""
        return self._transfers.pop(request_id, None)

    # --- the loop

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop after the running step; unfinished requests are aborted."""
        tasks = [*self._loads, *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(transfer.stop() for transfer in self._transfers.values()))
        self._transfers.clear()
        self._executor.shutdown(wait=True)
        for request_id in list(self.batcher.requests):
            self.batcher.abort(time.monotonic(), request_id)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._start_loads()
            step = self.batcher.schedule(time.monotonic())
            self._gauge()
            if step is None:
                await self._sleep()
                continue
            begin = time.monotonic()
            try:
                sampled = await loop.run_in_executor(self._executor, self._compute, step, loop)
            except Exception as error:
                log.exception("a step of %d requests failed", len(step.rows))
                self._fail(step, f"{type(error).__name__}: {error}")
                continue
            end = time.monotonic()
            self.costs.observe(step, end - begin)
            for row in step.rows:
                row.request.steps.add(begin, end, row.num_tokens)
            self._commit(step, sampled)

    async def _sleep(self) -> None:
        """Until something happens. Transfers free blocks without telling, so a blocked queue looks again soon."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BLOCKED_RETRY_S if self.batcher.waiting else None):
                await self._wake.wait()

    def _compute(self, step: Step, loop: asyncio.AbstractEventLoop) -> list[Sampled | None]:
        """Runs in the engine thread."""
        rows = [self._row(row.request, row.start, row.num_tokens, row.samples) for row in step.rows]
        transfers = [
            (transfer, row, list(row.request.block_ids))
            for row in step.rows
            if (transfer := self._transfers.get(row.request.request_id)) is not None
        ]

        def on_layer(layer: int) -> None:
            for transfer, row, block_ids in transfers:
                loop.call_soon_threadsafe(transfer.layer_done, block_ids, layer, row.start, row.start + row.num_tokens)

        return self.runner.step(rows, on_layer if transfers else None)

    def _row(self, request: Request, start: int, count: int, samples: bool) -> Row:
        sample = None
        if samples:
            eos = tuple(self.batcher.eos_token_ids)
            sample = SamplingRow(request.sampling, list(request.token_ids), request.num_prompt_tokens, eos_ids=eos)
        return Row(request.token_ids[start : start + count], start, list(request.block_ids), sample)

    def _commit(self, step: Step, sampled: Sequence[Sampled | None]) -> None:
        now = time.monotonic()
        done = self.batcher.commit(now, step, [(s.token_id,) if s else None for s in sampled])
        self._publisher.publish(done.named)
        emissions = []
        for request, index, _ in done.emitted:
            token = sampled[index]
            assert token is not None
            emissions.append(Emission(request, token.token_id, token.logprobs))
        self._metrics.observe_step(step.num_tokens)
        if emissions:
            self.on_emissions(emissions)

    def _fail(self, step: Step, error: str) -> None:
        """A step raised: its requests end here, the node lives on."""
        ended = self.batcher.fail(time.monotonic(), step)
        self.on_emissions([Emission(request, None, error=error) for request in ended])

    # --- prefix loads

    def _start_loads(self) -> None:
        for request in self.batcher.loads(time.monotonic(), MAX_LOADS_IN_FLIGHT):
            task = asyncio.create_task(self._load(request))
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)

    async def _load(self, request: Request) -> None:
        try:
            await self._loader.load(request)
        except Exception:
            log.exception("prefix load of %s failed; it will be computed", request.request_id)
        self.batcher.loaded(time.monotonic(), request)
        self.wake()

    def _gauge(self) -> None:
        running = len(self.batcher.running)
        waiting = sum(r.state is not RequestState.RUNNING for r in self.batcher.requests.values())
        usage = self.batcher.pool.usage()
        self._metrics.set_load(running, waiting, usage["held"] / usage["total"])
        for _ in range(self.batcher.num_preemptions - self._preemptions_seen):
            self._metrics.count_preemption()
        self._preemptions_seen = self.batcher.num_preemptions
