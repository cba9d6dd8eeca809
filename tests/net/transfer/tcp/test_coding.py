"""Coded frames between two nodes over TCP: the same bytes, fewer on the wire, and damage that only costs a retry."""

from __future__ import annotations

import asyncio
import random
import zlib
from contextlib import asynccontextmanager

import numpy as np
import pytest

from net.channel.wire import Frame
from net.codec.exponents import Exponents
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine
from net.transfer.tcp import coding as coding_module
from net.transfer.tcp.coding import Coding
from tests.net.peers import channels
from tests.net.transfer.tcp.test_bulk_calls import Get, Home, Put

MIB = 1 << 20
SIZE = 9 * MIB


class FixedRates(Exponents):
    """So that no test depends on how busy the machine is."""

    def __init__(self, rate: float) -> None:
        super().__init__("bfloat16")
        self.rate = rate

    def rates(self):
        return self.rate, self.rate


CODER, SLOW_CODER = FixedRates(4e9), FixedRates(1e4)


@asynccontextmanager
async def two(ours="always", theirs="always", most=0.0, coder=CODER):
    """(engine, region, coding) of a and of b; always, auto or None: how they code."""
    async with channels("a", "b") as made:
        codings = [None if how is None else Coding(coder, how == "always", most) for how in (ours, theirs)]
        engines = [
            TransferEngine(channel, ["tcp"], {"tcp": {"coding": coding}}, most)
            for channel, coding in zip(made, codings, strict=True)
        ]
        regions = [Region.shared(f"of-{one.node_id}", SIZE) for one in made]
        for engine, region in zip(engines, regions, strict=True):
            engine.register(region)
        try:
            yield list(zip(engines, regions, codings, strict=True))
        finally:
            for engine in engines:
                await engine.close()
            for region in regions:
                region.close()


def fill(region, seed=1, nbytes=SIZE):
    """bfloat16, as KV is."""
    values = np.random.default_rng(seed).standard_normal(nbytes // 2, np.float32)
    region.memory[:nbytes] = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def noise(region):
    region.memory[:] = random.Random(7).randbytes(MIB) * (SIZE // MIB)


def same(ours, theirs):
    return zlib.crc32(ours.memory) == zlib.crc32(theirs.memory)


def source_of(op, ours, theirs):
    return ours if op is Op.WRITE else theirs


def scattered(piece=12_288, count=200):
    """Runs as layers of blocks have them, in another order there."""
    order = random.Random(3).sample(range(SIZE // piece), count)
    return [(place * piece, (SIZE // piece - 1 - place) * piece, piece) for place in order]


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("spans", [[(0, 0, SIZE)], [(2, 4, 300_001)], [(0, 0, 100)], scattered()], ids=len)
async def test_the_bytes_arrive_and_the_wire_has_fewer(op, spans):
    async with two() as ((a, ours, coding), (_, theirs, others)):
        fill(source_of(op, ours, theirs))
        await a.submit("b", op, "of-a", "of-b", spans)
        for here, there, nbytes in spans:
            assert ours.memory[here : here + nbytes] == theirs.memory[there : there + nbytes]
        sender, receiver = (coding, others) if op is Op.WRITE else (others, coding)
        total = sum(nbytes for _, _, nbytes in spans)
        if total < coding_module.CODED_MIN:
            assert sender.sent["raw"] == 0
            return
        assert sender.sent == receiver.received and sender.sent["raw"] == total
        assert sender.sent["wire"] < 0.75 * total
        assert sender.seconds["encode"] > 0 and receiver.seconds["decode"] > 0
        assert a.coded()["frames"] == coding.frames


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("ours", "theirs"), [("always", None), (None, "always"), (None, None)])
async def test_both_nodes_must_offer_the_coder(op, ours, theirs):
    async with two(ours, theirs) as ((a, here, coding), (_, there, others)):
        fill(source_of(op, here, there))
        await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(here, there)
        assert not any(one.sent["raw"] for one in (coding, others) if one is not None)


@pytest.mark.parametrize("op", list(Op))
async def test_what_does_not_become_shorter_travels_raw(op):
    async with two() as ((a, ours, coding), (_, theirs, others)):
        noise(source_of(op, ours, theirs))
        await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(ours, theirs)
        sender = coding if op is Op.WRITE else others
        assert sender.sent["raw"] == 0 and sender.frames["raw"] >= SIZE // coding_module.CODED_FRAME_BYTES
        assert a._transports["tcp"].share("b") == 1.0


@pytest.mark.parametrize("op", list(Op))
async def test_auto_codes_on_a_slow_link_only(op):
    """--rail-limit is the slow link. The limit counts bytes on the wire, and placement sees raw bytes per second."""
    slow = 200e6
    async with two("auto", "auto", most=slow) as ((a, ours, coding), (_, theirs, others)):
        fill(source_of(op, ours, theirs))
        for _ in range(3):
            await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(ours, theirs)
        assert (coding if op is Op.WRITE else others).sent["raw"] == 3 * SIZE
        share = a._transports["tcp"].share("b")
        assert 0.6 < share < 0.75
        assert sum(a.bandwidth("b").values()) <= 1.001 * slow / share
    async with two("auto", "auto", coder=SLOW_CODER) as ((a, ours, coding), (_, theirs, others)):
        fill(source_of(op, ours, theirs))
        for _ in range(3):
            await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(ours, theirs)
        assert coding.link("b") > 0 and coding.sent["raw"] == others.sent["raw"] == 0


@pytest.mark.parametrize("op", list(Op))
async def test_a_frame_that_is_damaged_on_its_way_is_sent_again(op, monkeypatch, caplog):
    """Its check finds the flipped byte; the connection breaks, and another one moves the slice."""
    flipped = []
    intact = Coding.land

    def damaging(self, peer_id, frame: Frame, target) -> None:
        if not flipped:
            flipped.append(len(frame.data))
            frame.data[len(frame.data) // 2] ^= 0x10
        intact(self, peer_id, frame, target)

    monkeypatch.setattr(Coding, "land", damaging)
    async with two() as ((a, ours, _), (_, theirs, _)):
        fill(source_of(op, ours, theirs))
        await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert flipped and same(ours, theirs)
        assert sum(rail["resent"] for rail in a._transports["tcp"].rails("b")) >= 1
    assert "its check does not match" in caplog.text


@pytest.mark.parametrize("op", list(Op))
async def test_a_cancelled_transfer_writes_nothing_more(op):
    rng = random.Random(f"{op}")
    async with two() as ((a, ours, _), (_, theirs, _)):
        for _ in range(8):
            fill(source_of(op, ours, theirs))
            moving = asyncio.create_task(a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)]))
            for _ in range(rng.randrange(1, 60)):
                await asyncio.sleep(0)
            moving.cancel()
            await asyncio.wait([moving])
            target = theirs if op is Op.WRITE else ours
            target.memory[:] = bytes(SIZE)
            await asyncio.sleep(0.02)
            assert not any(target.memory[::4099])
        await a.submit("b", op, "of-a", "of-b", [(0, 0, SIZE)])
        assert same(ours, theirs)


@pytest.mark.parametrize("nbytes", [70_000, 400_000, 5 * MIB + 6])
async def test_bulk_calls_in_both_directions(nbytes):
    async with two() as ((a, ours, coding), (b, theirs, others)):
        Home(b, theirs)
        fill(theirs)
        call = Get(ours, 0, nbytes)
        await a.bulk.ask("b", call, 60, 60)
        assert ours.memory[:nbytes] == theirs.memory[:nbytes] and call.moved == nbytes
        coded = nbytes - (nbytes % MIB if nbytes % MIB < coding_module.CODED_MIN else 0)  # the last frame may be short
        assert others.sent["raw"] == coded == coding.received["raw"]
        assert call.seen[-1] == nbytes and call.seen == sorted(call.seen)
        fill(ours, seed=9)
        put = Put(ours, nbytes)
        await a.bulk.ask("b", put, 60, 60)
        assert put.answer["same"] and theirs.memory[:nbytes] == ours.memory[:nbytes]
        assert coding.sent["raw"] == coded and coding.sent["wire"] < 0.75 * nbytes


async def test_a_coded_frame_to_a_node_without_a_coder_breaks_the_connection(caplog):
    async with two("always", None) as ((a, ours, coding), _):
        fill(ours)
        await a.open("b")
        coding._theirs["b"] = coding_module.CodecRates(1e9, 1e9)  # as if b had offered it
        with pytest.raises(Exception, match=r"failed|lost"):
            await a.submit("b", Op.WRITE, "of-a", "of-b", [(0, 0, SIZE)], timeout_s=3)
    assert "--wire-codec none" in caplog.text


def test_offers_that_are_none_are_ignored():
    coding = Coding(CODER, always=True)
    for offer in ({}, {"coder": "other", "encode": 1.0, "decode": 1.0}, {"coder": "exponent", "encode": -1.0}):
        coding.met("b", offer)
        assert coding.ratio_to("b") == 0 == coding.ratio_from("b")
    coding.met("b", coding.offer())
    assert coding.ratio_to("b") > 0.9
    coding.lost("b")
    assert coding.ratio_to("b") == 0
