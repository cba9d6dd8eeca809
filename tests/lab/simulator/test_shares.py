"""The pool by the classes of production, and the fast stand-in held against it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from cache.homes.rendezvous import equal_members, homes
from cache.pool.admission import Always, SecondHit
from cache.pool.policies import choose
from cache.pool.policy import PLAIN
from cache.sessions.parked import Times
from lab.loads.generators import GENERATORS
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.disk import Disk
from lab.simulator.models.loop import Loop
from lab.simulator.models.shares import HomedPool, key_of
from lab.simulator.result import figures

NAMES = [f"node-{i}" for i in range(4)]


def made(dram: int, ssd: int = 0, admission=Always) -> tuple[Loop, HomedPool]:
    loop = Loop()
    disks = [Disk(loop, 100.0, 1e9) for _ in NAMES]
    return loop, HomedPool(NAMES, partial(choose, "lru"), admission, dram, ssd, disks, nbytes=100.0)


def check(pool: HomedPool) -> None:
    for share in pool.shares:
        share.dram.check_integrity()


def test_a_block_is_at_its_rendezvous_home():
    _, pool = made(50)
    blocks = range(100)
    pool.use(blocks, [PLAIN] * 100)
    for block in blocks:
        (home,) = homes(key_of(block), equal_members(NAMES))
        assert [name for name, share in zip(NAMES, pool.shares, strict=True) if share.has(key_of(block))] == [home]
    assert pool.run(blocks) == 100 and pool.missing(blocks).total() == 0
    assert pool.sources(blocks).total() == 100 and len(pool.sources(blocks)) == 4
    check(pool)


def test_a_share_is_full_alone_and_asks_its_admission():
    _, pool = made(5)
    pool.use(range(100), [PLAIN] * 100)
    assert [share.dram.usage()["named"] for share in pool.shares] == [5] * 4
    _, picky = made(5, admission=SecondHit)
    picky.use(range(100), [PLAIN] * 100)
    kept = [set(share.dram.keys()) for share in picky.shares]
    picky.use(range(100, 200), [PLAIN] * 100)
    assert [set(share.dram.keys()) for share in picky.shares] == kept, "nothing was offered twice"
    check(picky)


@pytest.mark.parametrize("ssd", [0, 40])
def test_blocks_of_sessions_that_are_over_go_once_their_tier_is_nearly_full(ssd):
    """As nodes do it (LocalStore.is_nearly_full): what DRAM could evict does not count as free."""
    loop, pool = made(40, ssd)
    share, tier = pool.shares[0], 40
    keys = [key_of(block) for block in range(tier)]
    for key in keys[: tier // 2]:
        share.put(key, PLAIN)
    loop.run()  # until the SSD has them
    share.parked.park(loop.now, keys[:5], 1, Times(math.inf, math.inf, math.inf, 1.0))
    share.move_sessions(loop.now + 2.0)
    assert not share.is_nearly_full and share.dropped == 0, "there is room"
    for key in keys[tier // 2 : tier - 3]:
        share.put(key, PLAIN)
    loop.run()
    share.move_sessions(loop.now + 2.0)
    assert not share.is_nearly_full and share.dropped == 0
    share.put(keys[tier - 3], PLAIN)
    loop.run()
    assert share.is_nearly_full, "95 %"
    share.move_sessions(loop.now + 2.0)
    assert share.dropped == 5 and [share.has(key) for key in keys[:6]] == [False] * 5 + [True]
    assert share.dram.num_evictions == 0
    check(pool)


def test_blocks_stay_in_dram_until_they_are_written_and_are_promoted_to_be_read():
    loop, pool = made(5, ssd=50)
    pool.use(range(100), [PLAIN] * 100)
    assert [share.dram.usage()["held"] for share in pool.shares] == [5] * 4, "no room while all are being written"
    loop.run()
    assert loop.now == pytest.approx(5.0), "each disk wrote five"
    written = [block for block in range(100) if pool.sources([block]) and not pool.missing([block])]
    assert len(written) == 20
    pool.use(range(100, 200), [PLAIN] * 100)
    loop.run()
    cold = [block for block in written if pool.cold([block])]
    assert cold and pool.run(cold) == len(cold) and pool.dram_run(cold) == 0
    ended: list[float] = []
    pool.read(cold[:1], lambda: ended.append(loop.now))
    loop.run()
    assert ended == [pytest.approx(loop.now)] and not pool.cold(cold[:1])
    check(pool)


def test_a_node_that_left_gives_its_keys_to_others():
    _, pool = made(50, ssd=50)
    pool.use(range(100), [PLAIN] * 100)
    own = [block for block in range(100) if pool.sources([block]) == {1: 1}]
    pool.lost(1)
    assert pool.run(own[:1]) == 0
    before = {block: pool.sources([block]) for block in range(100) if block not in own}
    pool.left(1)
    assert all(1 not in pool.sources([block]) for block in own)
    assert all(pool.sources([block]) == home for block, home in before.items()), "other keys stay"
    pool.use(own, [PLAIN] * len(own))
    assert pool.run(own) == len(own)
    pool.back(1)
    assert pool.sources(own) == {1: len(own)}
    check(pool)


@pytest.mark.parametrize(
    "change", [{}, {"cache_blocks": 0}, {"cache_blocks": 150, "pool_blocks": 150, "ssd_blocks": 600}]
)
def test_the_fast_pool_is_close_to_the_real_one(change):
    """The bounds that lab/simulator/models/pool.py states: hit rates within 0.02, mean TTFT within 10 %."""
    rows = [replace(row, timestamp_ms=4 * row.timestamp_ms) for row in GENERATORS["conversation"](3, 1000)]
    base = replace(SimConfig(prefill=4, decode=4, cache_blocks=1000, pool_blocks=1000), **change)
    real, fast = (figures(Cluster(replace(base, pool_model=kind)).played(rows)) for kind in ("real", "fast"))
    assert (real["pool_model"], fast["pool_model"]) == ("real", "fast")
    assert real["token_hit_rate"] > 0.1
    assert fast["token_hit_rate"] == pytest.approx(real["token_hit_rate"], abs=0.02)
    assert fast["ttft_s"]["mean"] == pytest.approx(real["ttft_s"]["mean"], rel=0.10)


def test_large_clusters_use_the_fast_pool_unless_told_otherwise():
    assert Cluster(SimConfig(prefill=32, decode=32)).pool.kind == "real"
    assert Cluster(SimConfig(prefill=33, decode=32)).pool.kind == "fast"
    assert Cluster(SimConfig(prefill=33, decode=32, pool_model="real")).pool.kind == "real"
    with pytest.raises(ValueError, match="--cache-admission tinylfu needs --pool-model real"):
        Cluster(SimConfig(pool_model="fast", cache_admission="tinylfu"))
