"""What moves KV on a GPU, over a device that does everything as late as CUDA may and in any order (tests/late_gpu.py):
staging, pooled blocks, arenas on several GPUs, layers that leave while others are computed, buffers of CUDA graphs."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.interface import RaggedBatch
from cache.block import BlockGeometry
from cache.pool.policy import PLAIN
from engine.loading.cuda_memory import CudaMemory
from engine.loading.split_arena import SplitArena
from engine.loading.split_memory import SplitMemory
from engine.model.graphs import GraphedModel
from engine.pooled.device_blocks import WINDOW_BLOCKS, DeviceBlocks
from engine.step.inputs import InputBuilder, Row
from engine.step.layer_reports import LayerReports
from net.transfer.common.memory import Region
from net.transfer.device.staging import DeviceRegion, DeviceTransferEngine
from net.transfer.engine import Op
from tests.engine.pooled.test_pool_blocks import DictStore
from tests.late_gpu import LateGpu
from tests.net.peers import channels

SEEDS = st.integers(0, 2**32 - 1)
few = settings(deadline=None, max_examples=15)


def noise(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def on(gpu: LateGpu, content: Tensor, device: int = 0) -> Tensor:
    with gpu.making(device):
        return content.clone()


# --- copies


@given(SEEDS, st.integers(0, 4), st.sampled_from([64, 256, 1024]))
@few
def test_copies_of_an_arena_run_in_the_order_of_their_stream(seed: int, strays: int, row: int) -> None:
    """Out and in through two buffers, each used again as soon as its copy is over."""
    rng, size = random.Random(seed), 64 * 1024
    with LateGpu(seed, strays) as gpu, Region.shared("host", 2 * 16 * row) as host:
        content = noise(size, seed % 1000)
        arena, wanted = on(gpu, content), content.clone()
        device = CudaMemory(arena, gpu)
        device.pin(host)
        running: dict[int, tuple[object, list[tuple[int, int, int]], Tensor | None]] = {}

        def end(half: int) -> None:
            copying, moves, expected = running.pop(half)
            copying.wait()
            if expected is not None:
                for here, there, length in moves:
                    assert host.memory[there : there + length] == expected[here : here + length].numpy().tobytes()

        for step in range(12):
            half = rng.randrange(2)
            if half in running:
                end(half)
            rows = rng.sample(range(size // row), rng.randint(1, 16))
            moves = [(number * row, (half * 16 + i) * row, row) for i, number in enumerate(rows)]
            if rng.random() < 0.5:
                running[half] = device.copy_out(host, moves), moves, wanted.clone()
            else:
                news = noise(16 * row, step + 7)
                host.memory[half * 16 * row : (half + 1) * 16 * row] = news.numpy().tobytes()
                running[half] = device.copy_in(host, moves), moves, None
                for i, number in enumerate(rows):
                    wanted[number * row : (number + 1) * row] = news[i * row : (i + 1) * row]
        for half in list(running):
            end(half)
        gpu.finish()
        assert torch.equal(gpu.peek(arena), wanted)


def test_scattered_layers_are_one_copy_over_the_bus() -> None:
    with LateGpu(0) as gpu, Region.shared("host", 1 << 16) as host:
        device = CudaMemory(on(gpu, noise(1 << 18, 1)), gpu)
        device.pin(host)
        moves = [(3 * i * 1024, i * 1024, 1024) for i in range(40)]
        moves[0], moves[-1] = (512, 512, 512), (moves[-1][0], moves[-1][1], 100)  # cut by the ends of a buffer
        for copy in (device.copy_out, device.copy_in):
            before = gpu.copies
            copy(host, moves).wait()
            assert gpu.copies - before <= 4, "row numbers, rows, and the two ends"


# --- layers that leave while others are computed


class Layers:
    """A step that writes one layer after the other, all queued at once, as a model does."""

    COUNT, BYTES = 6, 1024

    def __init__(self, gpu: LateGpu) -> None:
        self.gpu = gpu
        self.arena = on(gpu, torch.zeros(self.COUNT * self.BYTES, dtype=torch.uint8))

    def run(self, on_layer) -> None:
        for layer in range(self.COUNT):
            part = self.arena[layer * self.BYTES : (layer + 1) * self.BYTES]
            part.add_(1)
            part.mul_(layer + 5)
            on_layer(layer)


@given(SEEDS, st.integers(0, 3))
@few
def test_a_reported_layer_may_be_copied_out_at_once(seed: int, strays: int) -> None:
    """By a stream that waits for nothing; what is not computed yet is not waited for either."""
    with LateGpu(seed, strays) as gpu, Region.shared("host", Layers.COUNT * Layers.BYTES) as host:
        step = Layers(gpu)
        device = CudaMemory(step.arena, gpu)
        device.pin(host)
        reports, heard, behind, queued = LayerReports(gpu, step.arena), [], [], Event()

        def reported(layer: int) -> None:
            assert queued.wait(20), "the host has queued all layers before the device has computed one"
            heard.append(layer)
            at = layer * Layers.BYTES
            with gpu:  # another thread, which the device does not watch by itself
                device.copy_out(host, [(at, at, Layers.BYTES)]).wait()
            behind.append(gpu.current(0).ran < len(gpu.current(0).ops))
            assert set(host.memory[at : at + Layers.BYTES]) == {layer + 5}

        step.run(reports.behind(reported))
        queued.set()
        reports.finish()
        assert heard == list(range(Layers.COUNT))
        assert strays or behind == [True] * (Layers.COUNT - 1) + [False], "copies wait for their layer alone"


def test_a_report_that_fails_fails_the_step() -> None:
    with LateGpu(0) as gpu:
        step = Layers(gpu)
        reports = LayerReports(gpu, step.arena)

        def fails(layer: int) -> None:
            raise RuntimeError("the loop is closed")

        step.run(reports.behind(fails))
        with pytest.raises(RuntimeError, match="the loop is closed"):
            reports.finish()


# --- pooled blocks


class SlowStore(DictStore):
    """Reads and writes the window a while after it was asked, as a store does that waits for a peer."""

    def __init__(self, nbytes: int, rng: random.Random) -> None:
        super().__init__(nbytes)
        self._rng = rng

    async def put_from(self, *arguments, **options):
        for _ in range(self._rng.randint(0, 3)):
            await asyncio.sleep(0)
        return await super().put_from(*arguments, **options)

    async def get_into(self, *arguments, **options):
        for _ in range(self._rng.randint(0, 3)):
            await asyncio.sleep(0)
        return await super().get_into(*arguments, **options)


@given(SEEDS, st.integers(0, 4))
@few
def test_pooled_blocks_of_a_device_have_the_right_bytes(seed: int, strays: int) -> None:
    """Puts and gets of disjoint blocks at the same time, over windows that all of them share."""
    geometry = BlockGeometry(2, 1, 16, 4, "bfloat16")
    count, nbytes = 6 * WINDOW_BLOCKS, geometry.block_bytes
    keys = [i.to_bytes(16, "big") for i in range(count)]

    async def run(gpu: LateGpu) -> None:
        content = noise(2 * count * nbytes, seed % 1000)
        arena = on(gpu, content)
        store = SlowStore(nbytes, random.Random(seed))
        blocks = DeviceBlocks(store, DeviceRegion("kv", CudaMemory(arena, gpu)), geometry)
        half = count // 2
        assert await blocks.put(keys[:half], range(half), [PLAIN] * half) == half
        put = asyncio.create_task(blocks.put(keys[half:], range(half, count), [PLAIN] * half))
        got = await blocks.get(keys[:half], range(count, count + half))
        await put
        assert got.blocks == half
        assert (await blocks.get(keys[half:], range(count + half, 2 * count))).blocks == half
        gpu.finish()
        first = content[: count * nbytes]
        assert torch.equal(gpu.peek(arena), torch.cat((first, first)))
        assert store.values == {
            key: first[i * nbytes : (i + 1) * nbytes].numpy().tobytes() for i, key in enumerate(keys)
        }
        blocks.close()

    with LateGpu(seed, strays) as gpu:
        asyncio.run(run(gpu))


@given(SEEDS, st.integers(1, 3))
@few
def test_a_get_that_is_cancelled_again_and_again_ends_behind_its_copies(seed: int, times: int) -> None:
    """Its blocks are given to others when it has ended: nothing may be copied into them any more."""
    geometry = BlockGeometry(2, 1, 16, 4, "bfloat16")
    count, nbytes = 3 * WINDOW_BLOCKS, geometry.block_bytes
    keys = [i.to_bytes(16, "big") for i in range(count)]

    async def run(gpu: LateGpu) -> None:
        rng = random.Random(seed)
        arena = on(gpu, torch.zeros(count * nbytes, dtype=torch.uint8))
        store = SlowStore(nbytes, rng)
        store.values = dict.fromkeys(keys, b"\x01" * nbytes)
        memory = CudaMemory(arena, gpu)
        blocks = DeviceBlocks(store, DeviceRegion("kv", memory), geometry)
        getting = asyncio.create_task(blocks.get(keys, range(count)))
        for _ in range(times):
            for _ in range(rng.randint(0, 8)):
                await asyncio.sleep(0)
            getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
        copied_in = memory._stream
        assert copied_in.ran == len(copied_in.ops)
        blocks.close()

    with LateGpu(seed, 0) as gpu:
        asyncio.run(run(gpu))


# --- staging


@given(SEEDS, st.integers(0, 4))
@settings(deadline=None, max_examples=12)
def test_transfers_through_staging_have_the_right_bytes(seed: int, strays: int) -> None:
    """Between the devices of two nodes over real sockets, several at once, both ways; buffers are smaller than rows."""
    size, row = 64 << 10, 1536
    rng = random.Random(seed)

    async def run(gpu: LateGpu) -> None:
        async with channels("a", "b") as made:
            engines = [DeviceTransferEngine(channel, ["tcp"], buffer_bytes=4000) for channel in made]
            contents = [noise(size, seed % 1000 + i) for i in range(2)]
            arenas = [on(gpu, content, device) for device, content in enumerate(contents)]
            wanted = [content.clone() for content in contents]
            for engine, arena in zip(engines, arenas, strict=True):
                engine.register(DeviceRegion("kv", CudaMemory(arena, gpu)))
            rows = rng.sample(range(size // row), 40)
            pushed, pulled = rows[:20], rows[20:]
            spans = [[(number * row, number * row, row) for number in part] for part in (pushed, pulled)]
            await asyncio.gather(
                engines[0].submit("b", Op.WRITE, "kv", "kv", spans[0][:10]),
                engines[0].submit("b", Op.WRITE, "kv", "kv", spans[0][10:], priority=1),
                engines[0].submit("b", Op.READ, "kv", "kv", spans[1]),
            )
            for number in pushed:
                wanted[1][number * row : (number + 1) * row] = contents[0][number * row : (number + 1) * row]
            for number in pulled:
                wanted[0][number * row : (number + 1) * row] = contents[1][number * row : (number + 1) * row]
            gpu.finish()
            for arena, expected in zip(arenas, wanted, strict=True):
                assert torch.equal(gpu.peek(arena), expected)
            for engine in engines:
                await engine.close()

    with LateGpu(seed, strays) as gpu:
        asyncio.run(run(gpu))


# --- an arena on several GPUs


@given(SEEDS, st.integers(0, 4), st.sampled_from([(4, [0, 2, 4]), (4, [0, 1, 2, 3, 4]), (2, [0, 1, 2])]))
@few
def test_an_arena_on_several_gpus_goes_out_and_comes_in(seed: int, strays: int, share: tuple[int, list[int]]) -> None:
    heads, cuts = share
    head_bytes, planes = 96, 24
    rng = random.Random(seed)
    parts_of = [slice(a, b) for a, b in pairwise(cuts)]
    with ExitStack() as stack:
        gpu = stack.enter_context(LateGpu(seed, strays))
        plane = heads * head_bytes
        whole = noise(planes * plane, seed % 1000)
        grid = whole.view(planes, heads, head_bytes)
        parts = [on(gpu, grid[:, held].flatten(), device) for device, held in enumerate(parts_of)]
        memory = SplitMemory(SplitArena(parts, parts_of, heads, head_bytes, gpu), gpu)
        hosts = [stack.enter_context(Region.shared(f"host{i}", planes * plane)) for i in range(2)]
        for host in hosts:
            memory.pin(host)
        cut = sorted(rng.sample(range(planes * plane), 5))
        moves = [(a, a, b - a) for a, b in zip([0, *cut], [*cut, planes * plane], strict=True)]
        rng.shuffle(moves)
        memory.copy_out(hosts[0], moves).wait()
        assert torch.equal(torch.frombuffer(hosts[0].memory, dtype=torch.uint8), whole)
        news = noise(planes * plane, seed % 1000 + 1)
        hosts[1].memory[:] = news.numpy().tobytes()
        first, second = memory.copy_in(hosts[1], moves[:3]), memory.copy_in(hosts[1], moves[3:])
        second.wait()
        first.wait()
        hosts[1].memory[:] = bytes(planes * plane)
        for part, held in zip(parts, parts_of, strict=True):
            assert torch.equal(gpu.peek(part), news.view(planes, heads, head_bytes)[:, held].flatten())


# --- CUDA graphs

BLOCK, BLOCKS, WIDTH, VOCABULARY = 4, 12, 3, 17


@dataclass
class Sizes:
    vocab_size: int = VOCABULARY


class Toy:
    """In place of a Model: every tensor of a step has its part in the logits and in the pool, exactly."""

    def __init__(self) -> None:
        self.config = Sizes()
        self.embed = noise(VOCABULARY * WIDTH, 3).view(VOCABULARY, WIDTH).float()
        self.head = noise(WIDTH * VOCABULARY, 4).view(WIDTH, VOCABULARY).float()
        self.columns = torch.arange(64)

    def forward(self, token_ids, batch: RaggedBatch, kv_pool, rows, *options) -> Tensor:
        x = self.embed[token_ids] + batch.positions[:, None]
        slots = torch.where(batch.slot_mapping < 0, BLOCKS * BLOCK, batch.slot_mapping)  # padding: behind the blocks
        kv_pool.view(-1, WIDTH).index_copy_(0, slots, x)
        sums = kv_pool.view(-1, BLOCK * WIDTH).sum(1)
        used = self.columns[: batch.block_tables.shape[1]] * BLOCK < batch.ctx_lens[:, None]
        of_request = (sums[batch.block_tables.long()] * used).sum(1)
        owner = (torch.searchsorted(batch.cu_q.long(), rows, right=True) - 1).clamp(max=len(used) - 1)
        return x[rows] @ self.head + of_request[owner][:, None]


@st.composite
def steps(draw) -> list[list[Row]]:
    """Steps of up to three requests, each with a block or two of its own."""
    made = []
    for _ in range(draw(st.integers(2, 6))):
        rows = []
        for request in range(draw(st.integers(1, 3))):
            count = draw(st.sampled_from([1, 1, 2, 5]))
            start = draw(st.integers(0, 2 * BLOCK - count))
            tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count))
            rows.append(Row(tokens, start, [2 * request, 2 * request + 1]))
        made.append(rows)
    return made


@given(SEEDS, st.integers(0, 4), steps())
@settings(deadline=None, max_examples=10)
def test_steps_by_graphs_give_the_logits_of_the_model(seed: int, strays: int, listed: list[list[Row]]) -> None:
    """The host builds the next step while the device has not begun the last one, whose logits it reads behind that."""
    device = torch.device("cpu")
    plain, plain_pool = Toy(), torch.zeros(BLOCKS + 1, BLOCK, WIDTH)
    builder = InputBuilder(BLOCK, device)
    expected = []
    for rows in listed:
        inputs = builder.build(rows)
        last = inputs.batch.cu_q[1:].long() - 1
        expected.append((last, plain.forward(inputs.token_ids, inputs.batch, plain_pool, last).clone()))
    with LateGpu(seed, strays) as gpu:
        with gpu.making():
            toy, pool = Toy(), torch.zeros(BLOCKS + 1, BLOCK, WIDTH)
            late = InputBuilder(BLOCK, device, gpu)
            sizes = {"max_num_seqs": 3, "max_model_len": 2 * BLOCK}
            graphed = GraphedModel(toy, pool, BLOCK, gpu.recorder, **sizes)
        rng, unread = random.Random(seed), None

        def read() -> None:
            number, logits = unread
            assert torch.equal(gpu.read(logits), expected[number][1])

        for number, rows in enumerate(listed):
            inputs = late.build(rows)
            last = gpu.move(on_host(gpu, expected[number][0]), pool)
            if unread is not None:
                read()
            logits = graphed.forward(inputs.token_ids, inputs.batch, pool, last)
            unread = number, logits
            if rng.random() < 0.5:
                read()
                unread = None
        if unread is not None:
            read()
        gpu.finish()
        assert torch.equal(gpu.peek(pool)[:BLOCKS], plain_pool[:BLOCKS])


def on_host(gpu: LateGpu, rows: Tensor) -> Tensor:
    made = gpu.buffer(len(rows), rows)
    made.copy_(rows)
    return made
