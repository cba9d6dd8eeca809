"""One KV arena per node: running requests take room from named blocks, and pin those that they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.pool.policies import choose, policies
from lab.loads.trace import TraceRow
from lab.simulator.arena.accounts import Arena, FactsByPosition, Room
from lab.simulator.arena.block_pool import PooledArena
from lab.simulator.arena.stand_in import StandIn
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.result import figures
from tests.lab.simulator.test_cluster import MODEL, check, ran

SIZE = 10
KINDS = {"stand-in": StandIn, "real": PooledArena}


def made(kind: str, blocks: float, most: int = 10**6, eviction: str = "lru", kept: int = SIZE) -> Arena:
    facts = FactsByPosition(SIZE, lambda tokens, context: 1.0 + context)
    return KINDS[kind](Room(round(SIZE * blocks), SIZE, kept, most), facts, choose(eviction))


def whole(arena: Arena, who: str, blocks: list[int], more: int = 0) -> None:
    """`who` computes this prompt, and `more` tokens behind it."""
    arena.find(who, blocks, SIZE * len(blocks))
    arena.hold(who, SIZE * len(blocks) + more)
    arena.name(who, blocks)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_an_arena_full_of_running_requests_has_no_room_for_others(kind):
    arena = made(kind, 10)
    whole(arena, "old", [1, 2, 3, 4])
    arena.drop("old")
    assert arena.blocks == {1, 2, 3, 4} and arena.left == 100
    arena.hold("new", 65)
    assert arena.run([1, 2, 3, 4]) == 3 and arena.left == 35, "room for three"
    arena.grow("new", 85)
    arena.grown()
    assert arena.run([1, 2, 3, 4]) == 1, "an answer takes room too"
    arena.hold("last", 15)
    assert not arena.blocks and arena.left == 0 and arena.evicted == 4
    arena.drop("last")
    arena.drop("new")
    assert arena.left == 100 and arena.used == 0


def test_what_a_request_uses_stays_and_counts_once(kind):
    arena = made(kind, 10)
    whole(arena, "one", [1, 2, 3], 5)
    assert arena.used == 35
    whole(arena, "two", [1, 2, 9], 5)
    assert arena.used == 50, "two blocks are the same ones"
    assert arena.lacks("three", 40) == 40
    arena.drop("one")
    assert arena.used == 35 and arena.blocks == {1, 2, 3, 9}
    arena.hold("three", 65)
    assert arena.blocks == {1, 2, 9} and arena.left == 0


def test_a_prompt_that_waits_keeps_its_prefix_until_it_must_give_it_back(kind):
    arena = made(kind, 10)
    whole(arena, "one", [1, 2, 3])
    arena.drop("one")
    arena.find("waits", [1, 2, 3, 4], 39)
    assert arena.used == 30 and arena.lacks("waits", 40) == 10
    whole(arena, "two", [5, 6, 7, 8, 9, 10, 11])
    assert arena.run([1, 2, 3]) == 3 and arena.left == 0
    arena.strip()
    assert arena.left == 30 and arena.run([1, 2, 3]) == 3, "nobody has needed the room yet"
    arena.grow("two", 95)
    arena.grown()
    assert arena.run([1, 2, 3]) == 0 and arena.left == 5
    assert arena.was_stripped("waits") and not arena.was_stripped("waits")


def test_a_prefix_that_is_fetched_takes_room_from_the_beginning(kind):
    arena = made(kind, 5)
    whole(arena, "one", [1, 2, 3, 4])
    arena.drop("one")
    arena.load("loads", 30)
    assert arena.used == 30 and arena.blocks == {1, 2}
    arena.loaded("loads", [11, 12, 13, 14])
    assert arena.used == 30 and arena.blocks == {1, 2, 11, 12, 13} and arena.lacks("loads", 40) == 10
    arena.load("more", 40)
    arena.loaded("more", [21, 22, 23, 24])
    assert arena.blocks == {11, 12, 13, 21, 22} and arena.left == 0, "as much as there was room for"


def test_a_block_that_two_compute_at_once_is_there_twice(kind):
    arena = made(kind, 10)
    arena.hold("one", 20)
    arena.hold("two", 20)
    arena.name("one", [1, 2])
    arena.name("two", [1, 2])
    assert arena.used == 40 and arena.blocks == {1, 2}
    arena.drop("one")
    assert arena.used == 20 and arena.blocks == {1, 2}


def test_nothing_gets_a_name_where_nothing_is_kept_and_few_where_few_are(kind):
    off, few = made(kind, 10, most=0), made(kind, 10, most=2)
    for arena in (off, few):
        whole(arena, "one", [1, 2, 3, 4])
    assert (off.blocks, few.blocks) == (set(), {1, 2, 3, 4}) and off.used == few.used == 40
    for arena in (off, few):
        arena.drop("one")
    assert few.blocks == {1, 2} and few.evicted == 2, "in use it does not count"


def test_blocks_of_an_answer_stay_too_and_nobody_hears_of_them(kind):
    told: list[tuple[int, bool]] = []
    arena = made(kind, 10)
    arena.watch(lambda block, here: told.append((block, here)))
    whole(arena, "one", [1, 2], 25)
    arena.name_answer("one", 44)
    arena.drop("one")
    assert arena.used == 0 and len(arena.blocks) == 4 and {1, 2} < arena.blocks
    assert sorted(told) == [(1, True), (2, True)]
    arena.hold("two", 85)
    assert arena.blocks == {1}, "the end of the answer went first"


def test_a_lost_memory_has_nothing(kind):
    told: set[int] = set()
    arena = made(kind, 10)
    arena.watch(lambda block, here: (told.add if here else told.remove)(block))
    whole(arena, "one", [1, 2, 3], 7)
    arena.drop_all()
    assert arena.used == 0 and told == arena.blocks == {1, 2, 3}
    arena.clear()
    assert not told and not arena.blocks and arena.left == 100


prompts = st.tuples(st.integers(0, 3), st.integers(1, 6)).map(
    lambda made: [*range(min(2, made[1])), *(100 * (made[0] + 1) + k for k in range(2, made[1]))]
)
steps = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 5), prompts, st.integers(0, 25)),
    st.tuples(st.just("wait"), st.integers(0, 5), prompts),
    st.tuples(st.just("load"), st.integers(0, 5), prompts),
    st.tuples(st.just("part"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("answer"), st.integers(0, 5)),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(1, 25)),
    st.tuples(st.sampled_from(["drop", "drop", "drop", "strip", "drop_all", "clear"]), st.integers(0, 5)),
)


@settings(max_examples=150, deadline=None)
@example([("begin", 1, [0, 1, 102], 0), ("wait", 2, [0, 1]), ("drop", 1), ("begin", 0, [0], 0)], "lru", 6, 2, 17)
@given(
    st.lists(steps, max_size=60), st.sampled_from(sorted(policies)), st.sampled_from([6, 8.5, 13.3]),
    st.sampled_from([2, 10**6]), st.sampled_from([SIZE, 17]),
)  # fmt: skip
def test_the_stand_in_is_the_pool_of_production(events, eviction, blocks, most, kept):
    """After every event both have the same blocks, with and without users, and have told the same changes."""
    arenas, told = [made(kind, blocks, most, eviction, kept) for kind in KINDS], [[], []]
    for arena, into in zip(arenas, told, strict=True):
        arena.watch(lambda block, here, into=into: into.append((block, here)))
    known: dict[int, tuple[list[int], int]] = {}
    for event in events:
        for arena in arenas:
            apply(arena, event, known)
        if event[0] in ("begin", "wait", "load") and event[1] not in known:
            known[event[1]] = event[2], 0
        if event[0] in ("drop_all", "clear", "strip"):
            known.clear()
        if event[0] == "drop":
            known.pop(event[1], None)
        one, two = arenas
        assert (one.blocks, one.used, one.evicted) == (two.blocks, two.used, two.evicted), event
        assert sorted(told[0]) == sorted(told[1])
        two.pool.check_integrity()
        held = two.pool.usage()["held"]
        assert held == len(two._anonymous) + one._in_use and one._in_use == two._in_use
        if one.left >= 0:
            assert SIZE * one._in_use + kept * (len(one.blocks) - one._in_use) <= round(SIZE * blocks)


def apply(arena: Arena, event: tuple, known: dict[int, tuple[list[int], int]]) -> None:
    """What a batch may do in this state: nothing, where there is no room."""
    what, who = event[0], event[1]
    if what in ("begin", "wait", "load") and who not in known:
        blocks = event[2]
        arena.find(who, blocks, SIZE * len(blocks) - 1)
        need = SIZE * len(blocks) + (event[3] if what == "begin" else 0)
        if what == "load":
            arena.load(who, SIZE * (len(blocks) - 1))
            arena.loaded(who, blocks)
        elif what == "begin" and arena.lacks(who, need) <= arena.left:
            arena.hold(who, need)
            arena.name(who, blocks)
    elif what == "part" and who in known:
        arena.name(who, known[who][0][: event[2]])
    elif what == "grow" and who in arena._holders and who not in arena._waiting and event[2] <= arena.left:
        arena.grow(who, arena._holders[who].tokens + event[2])
        arena.grown()
    elif what == "answer" and who in arena._holders:
        arena.name_answer(who, arena._holders[who].tokens)
    elif what == "strip":
        arena.strip()
        arena.drop_all()
    elif what == "drop":
        arena.drop(who)
    elif what in ("drop_all", "clear"):
        getattr(arena, what)()


# --- nodes

SMALL = replace(MODEL, kv_tokens=512 * 40)


def chats(count: int, gap_ms: float, users: int = 6, answer: int = 60) -> list[TraceRow]:
    """Turns of `users` chats in turn, each with two blocks more than the one before."""
    return [
        TraceRow(
            i * gap_ms, 512 * (4 + 2 * (i // users % 4)) + 9, answer + i % 7,
            [1, *(100 * (1 + i % users + users * (i // users // 4)) + k for k in range(4 + 2 * (i // users % 4)))],
        )
        for i in range(count)
    ]  # fmt: skip


def node(**change) -> SimConfig:
    base = SimConfig(prefill=0, decode=0, mixed=1, step_noise=0.0, step_models="exact", output_lengths="oracle")
    return replace(base, **change)


@pytest.mark.parametrize("pool_model", ["real", "fast"])
def test_running_prompts_leave_no_room_for_cached_blocks(pool_model):
    """While a node runs as much as fits, nothing of what it computed before is left; idle again, it finds what ran
    last."""
    first = [TraceRow(0.0, 512 * 10, 2, list(range(10)))]
    full = [TraceRow(10_000.0, 512 * 9, 500, [1000 * (1 + k) + j for j in range(9)]) for k in range(4)]
    again = [TraceRow(60_000.0, 512 * 10, 2, list(range(10)))]
    cluster = ran(node(pool_model=pool_model), [*first, *full, *again], SMALL)
    check(cluster)
    assert cluster.jobs[-1].prefix_tokens == 0, "512 tokens more than the arena without it ran at once"
    assert cluster.nodes[0].arena.evicted >= 10
    roomy = ran(node(pool_model=pool_model), [*first, *full, *again], MODEL)
    assert roomy.jobs[-1].prefix_tokens == 512 * 9 and roomy.nodes[0].arena.evicted == 0


def test_requests_that_share_a_prefix_share_its_memory():
    """Eight requests run at once in an arena that has room for three of them apart."""
    alike = [TraceRow(2000.0 + i, 512 * 12 + 100, 400, list(range(12))) for i in range(8)]
    unlike = [TraceRow(2000.0 + i, 512 * 12 + 100, 400, [100 * i + k for k in range(12)]) for i in range(8)]
    begin = [TraceRow(0.0, 512 * 12 + 100, 1, list(range(12)))]
    together, apart = (ran(node(), [*begin, *rows], SMALL) for rows in (alike, unlike))
    for cluster, most in ((together, 8), (apart, 3)):
        check(cluster)
        spans = [(job.begun, job.finished) for job in cluster.jobs[1:]]
        assert max(sum(begun <= at < end for begun, end in spans) for at, _ in spans) == most


def test_a_preempted_request_finds_its_prompt():
    """As in the engine, whose named blocks stay in the prefix cache."""
    rows = [TraceRow(i, 512 * 6, 2500, [100 * i + k for k in range(6)]) for i in range(5)]
    kept = ran(node(output_lengths="limit"), rows, SMALL)
    lost = ran(node(output_lengths="limit", cache_blocks=0), rows, SMALL)
    for cluster in (kept, lost):
        assert figures(cluster)["preemptions"] > 0 and figures(cluster)["finished"] == 5
        assert cluster.nodes[0].batch.held_tokens == 0
    again = [job.prefix_tokens for job in kept.jobs if job.preemptions]
    assert max(again) >= 512 * 5 and not any(job.prefix_tokens for job in lost.jobs)


SHAPES: dict[str, dict[str, int]] = {"mixed": {"mixed": 2}, "apart": {"mixed": 0, "prefill": 2, "decode": 1}}


@pytest.mark.parametrize("lengths", ["oracle", "limit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_kinds_of_arena_give_the_same_run_and_a_seed_replays(shape, lengths):
    def bytes_of(pool_model: str, cluster_of: Callable[[SimConfig], Cluster]) -> bytes:
        config = node(pool_model=pool_model, output_lengths=lengths, step_noise=0.05, **SHAPES[shape])
        return orjson.dumps({**figures(cluster_of(config)), "pool_model": ""})

    def played(config: SimConfig) -> Cluster:
        cluster = ran(config, chats(120, 40.0), SMALL)
        assert figures(cluster)["finished"] == 120 and not any(one.batch.held_tokens for one in cluster.nodes)
        assert sum(one.arena.evicted for one in cluster.nodes) > 50 and figures(cluster)["token_hit_rate"] > 0.05
        return cluster

    real = bytes_of("real", played)
    assert real == bytes_of("real", played) == bytes_of("fast", played)


@pytest.mark.parametrize("pool_model", ["real", "fast"])
@pytest.mark.parametrize("gap_ms", [5.0, 60.0])
def test_a_small_arena_behind_a_pool_serves_everything(pool_model, gap_ms):
    """Prompts whose prefixes are fetched take room too: they wait, or lose it again, and all of them end."""
    for lengths in ("oracle", "limit"):
        for shape in SHAPES.values():
            config = node(pool_model=pool_model, output_lengths=lengths, pool_blocks=400, reservations=True, **shape)
            cluster = ran(config, chats(150, gap_ms), SMALL)
            found = figures(cluster)
            assert found["finished"] == 150 and found["token_hit_rate"] > 0.05
            assert not any(one.batch.held_tokens for one in cluster.nodes)


def test_the_arena_of_a_node_has_the_blocks_of_its_memory():
    config = SimConfig(block_tokens=16, prefill=1, decode=1)
    prefill, decode = Cluster(config, replace(MODEL, kv_tokens=6400 + 9)).nodes
    assert isinstance(prefill.arena, PooledArena) and prefill.arena.pool.num_blocks == 400
    assert prefill.arena.left == decode.arena.left == prefill.free_tokens == 6409 and not decode.arena.keeps
    told, _ = Cluster(replace(config, kv_blocks=300), MODEL).nodes
    assert told.arena.left == told.free_tokens == 4800
