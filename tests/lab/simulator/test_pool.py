"""The SSD tier: a device that is shared, a pool whose cold blocks their nodes read, and whole runs over it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.pool.policies import policies
from cache.pool.policy import PLAIN
from lab.loads.trace import TraceRow
from lab.simulator.cluster import Cluster
from lab.simulator.config import IDEAL, SimConfig
from lab.simulator.models.disk import Disk
from lab.simulator.models.loop import Loop
from lab.simulator.models.pool import Pool
from lab.simulator.models.step_models import StepModel

MODEL = StepModel(
    name="round", prefill=(0.0, 1e-3, 0.0), decode=(0.0, 0.0, 1e-2, 0.0, 0.0), token_bytes=1000, kv_tokens=100_000,
    chunk_tokens=100_000, nic_bytes_s=1e12, nic_latency_s=1e-9, ssd_bytes_s=5.12e6, ssd_iops=1e9,
)  # fmt: skip
"""A block of 512 tokens is computed in half a second and read in a tenth."""


def test_a_disk_is_shared_evenly_and_counts_operations():
    loop, ended = Loop(), {}
    disk = Disk(loop, bytes_s=100.0, iops=10.0)
    disk.move(0, 100, lambda: ended.setdefault("a", loop.now))
    disk.move(5, 50, lambda: ended.setdefault("b", loop.now))
    loop.at(1.0, disk.move, 0, 50, lambda: ended.setdefault("c", loop.now))
    loop.run()
    # Each alone takes 1, 1 and 0.5 s; a and b halve the device for a second, then all three share it.
    assert ended == {"a": pytest.approx(2.5), "b": pytest.approx(2.5), "c": pytest.approx(2.5)}
    assert disk.busy_s == pytest.approx(2.5)


def test_a_disk_knows_how_long_a_move_would_take_now():
    loop, ended = Loop(), {}
    disk = Disk(loop, bytes_s=100.0, iops=10.0)
    assert disk.seconds(5, 50) == pytest.approx(1.0)
    disk.move(0, 100, lambda: None)
    disk.move(5, 250, lambda: None)

    def ask() -> None:
        for name, nbytes in {"short": 10, "long": 200}.items():
            ended[name] = disk.seconds(0, nbytes)
        disk.move(0, 200, lambda: ended.setdefault("moved", loop.now - 1.0))

    loop.at(1.0, ask)
    loop.run()
    # Of 1 and 3 s alone, 0.5 and 2.5 are left when they are asked.
    assert ended == {"short": pytest.approx(0.3), "long": pytest.approx(4.5), "moved": pytest.approx(4.5)}


def test_cold_blocks_are_read_by_their_nodes_at_once():
    loop, done = Loop(), []
    disks = [Disk(loop, 100.0, 1e9) for _ in range(2)]
    pool = Pool(policies["lru"], 2, 10, disks, nbytes=100.0)
    pool.use(range(8), [PLAIN] * 8)  # 4 fit into DRAM: the prompt's beginning
    loop.run()
    assert loop.now == pytest.approx(4.0), "all 8 were written behind, 4 by each node"
    assert pool.run(range(9)) == 8 and pool.dram.blocks == {0, 1, 2, 3}
    assert (pool.cold(range(4)), pool.cold(range(7))) == ({}, {0: 2, 1: 1})
    assert (pool.read_s(pool.cold(range(4))), pool.read_s(pool.cold(range(7)))) == (0.0, pytest.approx(2.0))
    pool.read(range(4), lambda: done.append(loop.now))
    assert len(done) == 1 and loop.now < 4.1, "they are in DRAM"
    pool.read(range(7), lambda: done.append(loop.now))
    loop.run()
    assert done[1:] == [pytest.approx(6.0, abs=1e-6)], "node 0 reads two of them"


def test_a_crash_empties_dram_and_hides_the_ssd_until_it_is_back():
    pool = Pool(policies["lru"], 10, 10, [Disk(Loop(), 1.0, 1.0) for _ in range(2)], 1.0)
    pool.use(range(4), [PLAIN] * 4)
    pool.lost(1)
    assert pool.run(range(4)) == 1, "block 1 was on the node that is gone"
    pool.back(1)
    assert pool.run(range(4)) == 4 and pool.dram.blocks == {0, 2}


BASE = SimConfig(
    prefill=1, decode=1, cache_blocks=0, pool_blocks=1, ssd_blocks=50, probe_s=0.0, lookup_s=0.0,
    pool_model="fast", **IDEAL,
)  # fmt: skip


def two_turns(config: SimConfig) -> Cluster:
    """The second finds two of its eight known blocks in DRAM, and three per SSD."""
    chat = list(range(8))
    cluster = Cluster(config, MODEL)
    list(cluster.run([TraceRow(0.0, 8 * 512, 1, chat), TraceRow(1e6, 8 * 512 + 100, 1, [*chat, 99])]))
    return cluster


def test_a_prefix_from_the_ssd_costs_its_reading():
    def second(config: SimConfig) -> tuple[int, float]:
        job = two_turns(config).jobs[1]
        return job.prefix_tokens, job.ttft

    assert second(BASE) == (8 * 512, pytest.approx(0.1 + 3 * 0.1, abs=1e-3)), "two of eight in DRAM, three per SSD"
    assert second(replace(BASE, ssd_gbyte_s=1.0)) == (8 * 512, pytest.approx(0.1, abs=0.01))
    found, ttft = second(replace(BASE, ssd_blocks=0))
    assert found == 2 * 512 and ttft == pytest.approx(0.1 + 6 * 0.512)


@pytest.mark.parametrize(("slower", "read_s"), [(1, 0.3), (10, 3.0), (11, None)])
def test_placement_counts_the_reading_or_computes_instead(slower, read_s):
    """Six blocks are computed in 3.07 s."""
    job = two_turns(replace(BASE, ssd_gbyte_s=MODEL.ssd_bytes_s / 1e9 / slower)).jobs[1]
    assert job.estimates["transfer_s"] == pytest.approx(read_s or 0.0, abs=1e-3)
    assert job.estimates["ttft_s"] == pytest.approx(job.ttft, rel=0.01)
    assert job.prefix_tokens == (2 if read_s is None else 8) * 512


def test_a_load_from_ssd_tells_nothing_about_the_network():
    cluster = two_turns(replace(BASE, links="learnt"))
    assert cluster.jobs[1].fetched == pytest.approx(0.3, abs=0.01)
    before = two_turns(replace(BASE, links="learnt", pool_blocks=0, ssd_blocks=0)).links.fetch_each(["prefill-0"])
    assert cluster.links.fetch_each(["prefill-0"]) == before
    from_dram = two_turns(replace(BASE, links="learnt", pool_blocks=8, decode=7))  # the home is another node
    assert from_dram.links.fetch_each(["prefill-0"]) != before, "without a disk in between it is learnt"


@pytest.mark.parametrize("wrong", [{"ssd_blocks": 5}, {"ssd_gbyte_s": -1.0}])
def test_wrong_flags_are_named(wrong):
    with pytest.raises(ValueError, match="--" + next(iter(wrong)).replace("_", "-")):
        Cluster(SimConfig(**wrong), MODEL)


@pytest.mark.parametrize(("kind", "room"), [("fast", 4), ("real", 8)])
def test_a_store_keeps_the_pool_and_sends_it(kind, room):
    """Its NIC carries what is published and fetched; the other nodes keep nothing."""
    config = replace(BASE, prefill=2, store=1, pool_blocks=room, pool_model=kind, publish="home", kv_overlap="none")
    slow = replace(MODEL, nic_bytes_s=1e7)
    cluster = Cluster(config, slow)
    chat = list(range(8))
    list(cluster.run([TraceRow(0.0, 8 * 512, 1, chat), TraceRow(1e6, 8 * 512 + 100, 1, [*chat, 99])]))
    assert cluster.homes == ["store-0"] and len(cluster.disks) == 1
    first, second = cluster.jobs
    assert first.fetched_tokens == 0 and second.fetched_tokens == second.prefix_tokens == 8 * 512
    cold = 8 - room
    assert second.ssd_tokens == cold * 512, "the others fit into DRAM"
    moved = 8 * 512 * 1000
    assert cluster.network.bytes_moved == pytest.approx(2 * moved, rel=0.2), "published and fetched"
    assert second.ttft == pytest.approx(0.1 + cold * 0.1 + moved / 1e7, rel=0.05)


def test_a_store_and_faults_are_refused_together():
    with pytest.raises(ValueError, match="--store does not work with"):
        replace(BASE, store=1, faults="crash:prefill-0@1+2")
