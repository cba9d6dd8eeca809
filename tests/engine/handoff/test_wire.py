"""KV that is encoded on its way to the decode node (--wire-dtype): the blocks at the end, and nothing else."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.codes import DTYPES
from attention.quantize_torch import decode_block, encode_block
from cache.block import BlockGeometry
from cache.pool.block_pool import BlockPool
from cache.pool.policies import policies
from engine.core.kv_ready import KvReady, KvTarget, Piece
from engine.core.kv_transfer import KvReport, KvTransfer
from engine.handoff import messages
from engine.handoff.pull import KvPull, PullOffer
from engine.handoff.push import EncodedPush, Push
from engine.handoff.wire import WireCodec, windows
from net.errors import RemoteError
from net.transfer.common.memory import Region
from net.transfer.common.spans import unpack_spans
from net.transfer.engine import TransferEngine
from tests.net.peers import channels, until

LAYERS, SIZE, BLOCKS = 4, 8, 24
THERE = [9, 2, 5, 20, 17]
TOKENS = SIZE * len(THERE) - 3


def geometry_of(wire_dtype: str = "int8", dtype: str = "bfloat16") -> BlockGeometry:
    return BlockGeometry(LAYERS, 2, 16, SIZE, dtype, "", wire_dtype)


class Side:
    """A node's arena, full of NaN, and what encodes for it."""

    def __init__(
        self, channel: Any, order: tuple[str, ...], geometry: BlockGeometry, staging_blocks: int, options: dict
    ) -> None:
        """options: of the transports."""
        self.channel, self.geometry = channel, geometry
        self.transfer = TransferEngine(channel, order, options)
        self.region = Region.shared("kv", BLOCKS * geometry.block_bytes)
        self.kv = torch.frombuffer(self.region.memory, dtype=getattr(torch, geometry.dtype)).view(-1, *geometry.shape)
        self.kv.fill_(torch.nan)
        self.codec = WireCodec(self.region, geometry, staging_blocks * geometry.encoded_bytes)
        self.transfer.register(self.region)
        self.transfer.register(self.codec.region)

    async def close(self) -> None:
        await self.transfer.close()
        self.codec.close()
        del self.kv
        self.region.close()


@asynccontextmanager
async def pair(order=("tcp",), geometry=None, staging_blocks: int = 16, options=({}, {})):
    """(prefill side, decode side, its KvPull for THERE); options: of the transports of each side."""
    geometry = geometry or geometry_of()
    async with channels("p", "d") as (p_channel, d_channel):
        p, d = (
            Side(channel, order, geometry, staging_blocks, each)
            for channel, each in zip((p_channel, d_channel), options, strict=True)
        )
        writes = KvPull(d.transfer, "kv", geometry.block_bytes, "p", THERE, d.codec)

        async def pull(peer, body, data):
            done = await writes.read(body["region"], unpack_spans(data), body["timeout_s"])
            return {"nbytes": done.nbytes, "seconds": done.seconds, "transport": done.transport}

        async def decode(peer, body, data):
            await writes.decode(unpack_spans(data))
            return {}

        d_channel.handle(messages.PULL, pull)
        d_channel.handle(messages.DECODE, decode)
        try:
            yield p, d, writes
        finally:
            await writes.stop()
            for side in (p, d):
                await side.close()


def mover_of(how: str, p: Side, target: KvTarget) -> Any:
    region = p.codec.region.name
    if how == "pull":
        return PullOffer(p.channel, region, "r", target, 30.0)
    return EncodedPush(Push(p.transfer, region, target, 30.0), p.channel, "r", target, 30.0)


def target_of(d: Side, first_missing: int = 0) -> KvTarget:
    return KvTarget("d", "kv", THERE, first_missing, d.transfer.epoch_of("p"))


def prompt_kv(geometry: BlockGeometry) -> torch.Tensor:
    """[blocks, *shape]: of heads of very different size, as keys have them."""
    x = torch.randn(len(THERE), *geometry.shape, generator=torch.Generator().manual_seed(7))
    return (x * torch.tensor([0.02, 50.0])[:, None, None]).to(getattr(torch, geometry.dtype))


def encoded_and_back(block: torch.Tensor, tokens: int, geometry: BlockGeometry) -> torch.Tensor:
    """Of a block of which this many tokens are known."""
    block = block.clone()
    block[..., tokens:, :] = 0
    codes, out = torch.empty(geometry.encoded_bytes, dtype=torch.uint8), torch.empty_like(block)
    encode_block(block, DTYPES[geometry.wire_dtype], codes)
    decode_block(codes, DTYPES[geometry.wire_dtype], out)
    return out


@pytest.mark.parametrize("overlap", ["layer", "chunk", "none"])
@pytest.mark.parametrize("how", ["push", "pull"])
@pytest.mark.parametrize(
    ("order", "wire_dtype", "dtype", "pause"),
    [
        (("shm", "tcp"), "int8", "bfloat16", True),
        (("tcp",), "int8", "float32", False),
        (("tcp",), "fp8", "bfloat16", True),
        (("shm", "tcp"), "fp8", "float16", False),
    ],
)
async def test_the_decode_node_has_what_the_encoding_leaves(order, wire_dtype, dtype, pause, how, overlap):
    await hand_over(order, geometry_of(wire_dtype, dtype), pause, how, overlap)


async def hand_over(
    order: tuple[str, ...], geometry: BlockGeometry, pause: bool, how: str, overlap: str, options=({}, {})
) -> KvReport:
    """In three chunks that end inside blocks; NaN lies behind what is computed. Without a pause all that is ready
    gathers in one batch: a half-filled block is then in it twice, and the second time has to land second."""
    async with pair(order, geometry, staging_blocks=4, options=options) as (p, d, _):
        pool, kv = BlockPool(BLOCKS, policies["lru"]()), prompt_kv(geometry)
        here, target = pool.allocate(len(THERE)), target_of(d, first_missing=1)
        ready = KvReady(geometry, target, TOKENS, overlap)
        transfer = KvTransfer("d", mover_of(how, p, target), ready, pool, p.codec)
        for start, end in ((0, 11), (11, 21), (21, TOKENS)):
            for layer in range(LAYERS):
                for token in range(start, end):
                    block, row = divmod(token, SIZE)
                    p.kv[here[block], layer, :, :, row] = kv[block, layer, :, :, row]
                transfer.layer_done(here, layer, start, end)
                if pause:
                    await asyncio.sleep(0.003)
        report = await transfer.finish()
        for block, there in enumerate(THERE):
            if block < 1:
                assert d.kv[there].isnan().all(), "it had that already"
                continue
            wanted = encoded_and_back(kv[block], min(SIZE, TOKENS - block * SIZE), geometry)
            assert torch.equal(d.kv[there], wanted), f"block {block}"
        others = [i for i in range(BLOCKS) if i not in THERE]
        assert d.kv[others].isnan().all()
        assert report.saved * geometry.encoded_layer_bytes == report.nbytes * (
            geometry.layer_bytes - geometry.encoded_layer_bytes
        )
        assert report.transport == order[0] and (pause or report.batches == 1)
        if overlap == "none":
            assert report.nbytes == (len(THERE) - 1) * geometry.encoded_bytes
        pool.release(here)
        assert pool.usage()["held"] == 0
        assert len(p.codec._staging._free) == p.codec._staging.num_slots
        return report


def pieces_of(block_ids: list[int], geometry: BlockGeometry) -> list[Piece]:
    size = geometry.block_bytes
    return [Piece(here, here * size, there * size, size, SIZE) for here, there in zip(block_ids, THERE, strict=True)]


@pytest.mark.parametrize("how", ["push", "pull"])
async def test_stopping_waits_for_what_is_being_decoded(how):
    async with pair() as (p, d, writes):
        p.kv[:5] = prompt_kv(p.geometry)
        held, asked = asyncio.Event(), asyncio.Event()
        decode = d.codec.decode

        async def slow(spans):
            asked.set()
            try:
                await held.wait()
            finally:
                await decode(spans)

        d.codec.decode = slow
        pieces = pieces_of([0, 1, 2, 3, 4], p.geometry)
        moving = asyncio.create_task(p.codec.move(pieces, mover_of(how, p, target_of(d))))
        await asked.wait()
        await writes.stop()
        before = d.kv.clone()
        held.set()
        with pytest.raises(RemoteError, match="has ended on the decode node"):
            await moving
        with pytest.raises(RemoteError, match="has ended on the decode node"):
            await p.codec.move(pieces[:1], mover_of("pull", p, target_of(d)))
        await asyncio.sleep(0.02)
        assert torch.equal(d.kv.view(torch.int16), before.view(torch.int16))
        await until(lambda: len(p.codec._staging._free) == p.codec._staging.num_slots)


async def test_bytes_that_are_no_encoded_layers_are_refused():
    async with pair() as (p, d, writes):
        size, layer, codes = (getattr(p.geometry, f"{name}_bytes") for name in ("block", "layer", "encoded_layer"))
        first = THERE[0] * size
        for offset, nbytes in ((first + 1, codes), (first, codes - 4), (first + layer, LAYERS * codes), (first, 0)):
            with pytest.raises(RemoteError, match="not whole encoded layers"):
                await writes.decode([(0, offset, nbytes)])
        with pytest.raises(RemoteError, match="lie outside the request's blocks"):
            await writes.decode([(0, 0, codes)])
        plain = KvPull(d.transfer, "kv", size, "p", THERE)
        with pytest.raises(RemoteError, match="--wire-dtype"):
            await plain.decode([(0, first, codes)])


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, LAYERS - 1)), max_size=60), st.integers(1, 5))
def test_windows_keep_the_order_and_never_hold_the_same_bytes_twice(wanted, num_slots):
    """(block, a layer of it or all of it)"""
    geometry = geometry_of()
    size, part = geometry.block_bytes, geometry.layer_bytes
    pieces = [
        Piece(block, block * size + (layer or 0) * part, (9 - block) * size + (layer or 0) * part, nbytes, SIZE)
        for block, layer in wanted
        for nbytes in [size if layer is None else part]
    ]
    made = list(windows(pieces, geometry, num_slots))
    assert [piece for window in made for slot in window for piece in slot] == pieces
    for window in made:
        assert 1 <= len(window) <= num_slots
        assert all(sum(piece.nbytes for piece in slot) <= size for slot in window)
        cells = [
            (piece.remote + at) // part for slot in window for piece in slot for at in range(0, piece.nbytes, part)
        ]
        assert len(cells) == len(set(cells))
