"""Sessions of a simulated cluster: parked, brought up, and dropped by the classes of production."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from cache.pool.policy import Facts
from cache.sessions.parked import Times
from lab.loads.sessions import KINDS, PERIODIC, sessions
from lab.loads.trace import TraceRow, read_trace, write_trace
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.shares import HomedPool
from lab.simulator.result import figures
from lab.simulator.sessions.turns import Turns
from sched.sessions.parking import ParkingRules

EACH = SimConfig(prefill=1, decode=1, cache_blocks=0, pool_blocks=40, ssd_blocks=400, ssd_gbyte_s=2.0, step_noise=0.0)
PARKED = replace(EACH, session_parking=True)


def turn(at_s: float, session: int, blocks: int = 20) -> TraceRow:
    """A session has its own blocks, and each turn has one more."""
    first = 1000 * (session + 1)
    return TraceRow(1000 * at_s, 512 * blocks + 100, 4, [*range(first, first + blocks + 1)], session=session)


def test_blocks_leave_dram_first_and_come_up_at_their_time():
    run = Cluster(PARKED)
    pool, loop, facts = run.pool, run.loop, [Facts()] * 60
    assert isinstance(pool, HomedPool)

    def used(first: int, count: int) -> None:
        pool.use(range(first, first + count), facts)
        loop.run()  # until the SSDs have them

    used(0, 20)
    used(100, 30)
    pool.park(loop.now, range(100, 110), 1, Times(0.0, math.inf, math.inf, math.inf))
    pool.park(loop.now, range(110, 130), 2, Times(0.0, 50.0, 80.0, math.inf))
    used(200, 60)
    parked = [pool.dram_run([block]) for block in range(100, 130)]
    assert sum(parked) < 15, "they left first"
    pool.park(loop.now, range(200, 260), 3, Times(0.0, math.inf, math.inf, math.inf))  # theirs is the room
    pool.move_sessions(loop.now + 50.0)
    loop.run()
    assert pool.raised > 0
    assert [pool.dram_run([block]) for block in range(110, 130)] > parked[10:]


def test_blocks_of_sessions_that_do_not_return_make_room_on_a_full_ssd():
    """Of least recently used, the session that returns is the oldest."""
    small = replace(EACH, pool_blocks=20, ssd_blocks=80)
    once = [turn(5.0 * i, 100 + i) for i in range(200)]
    back = [turn(1100.0 + 900.0 * i, 0) for i in range(2)]
    late = [turn(1150.0 + 5.0 * i, 400 + i) for i in range(6)]
    runs = [
        Cluster(config).played(sorted([*once, *back, *late], key=lambda row: row.timestamp_ms))
        for config in (small, replace(small, session_parking=True))
    ]
    assert figures(runs[0])["blocks_dropped"] == 0 < figures(runs[1])["blocks_dropped"]


def test_a_load_without_sessions_is_not_changed():
    rows = [replace(row, session=-1) for row in sessions(3, 150)]
    runs = [Cluster(config).played(rows) for config in (EACH, PARKED)]
    assert [job.finished for job in runs[0].jobs] == [job.finished for job in runs[1].jobs]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_run_and_every_request_is_answered(seed):
    rows = sessions(seed, 300)
    first, second = (figures(Cluster(PARKED).played(rows)) for _ in range(2))
    assert first == second
    assert first["finished"] == 300


def test_a_session_that_was_forgotten_during_its_turn_is_not_parked():
    """Above `sessions_max` of them, the one without a turn for longest is forgotten; an acceptor of production does
    not park it either."""
    run = Cluster(PARKED)
    assert isinstance(run.pool, HomedPool)
    turns = Turns(run.loop, run.pool, ParkingRules(), sessions_max=2)
    jobs = [SimpleNamespace(session=session) for session in range(3)]
    for job in jobs:
        turns.begun(job)
    for job in jobs:
        turns.over(job, [job.session])
    run.loop.run()
    assert turns.ways.total() == 2
    turns.begun(jobs[0])
    turns.over(jobs[0], [0])
    run.loop.run()
    assert turns.ways.total() == 3, "as a new one"


def test_parking_needs_homes():
    with pytest.raises(ValueError, match="pool-model real"):
        Cluster(replace(PARKED, pool_model="fast"))


def test_generated_sessions_grow_and_return_by_their_habit(tmp_path):
    rows = sessions(5, 600, kinds=(PERIODIC,))
    assert rows == sessions(5, 600, kinds=(PERIODIC,)) and len(rows) == 600
    by_session: dict[int, list[TraceRow]] = {}
    for row in rows:
        by_session.setdefault(row.session, []).append(row)
    several = [turns for turns in by_session.values() if len(turns) > 2]
    assert several
    for turns in several:
        for before, after in pairwise(turns):
            full = before.input_length // 512
            assert after.hash_ids[:full] == before.hash_ids[:full] and after.input_length > before.input_length
            assert after.timestamp_ms - before.timestamp_ms > 1000 * PERIODIC.gap_s[0] * 0.8
    path = tmp_path / "trace.jsonl"
    write_trace(path, rows)
    assert [row.session for row in read_trace(path)] == [row.session for row in rows]


def test_all_kinds_come_in_one_load():
    rows = sessions(1, 2000)
    assert len(rows) == 2000 and len({row.session for row in rows}) > 150
    assert [row.timestamp_ms for row in rows] == sorted(row.timestamp_ms for row in rows)
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)
