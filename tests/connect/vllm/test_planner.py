"""What the connector looks up, waits for, loads and saves."""

from __future__ import annotations

import random

import pytest

from cache.keys import extend_keys
from cache.results import LeadingRun
from connect.vllm.options import Options
from connect.vllm.planner import ATTEMPTS, FRESH_S, Match, Planner, Row
from connect.vllm.work import rank_keys

SIZE = 4
ROOT = bytes(16)
PROMPT = list(range(100, 118))  # 4 full blocks and 2 tokens


def planner(layers_at_once=8, may_background=True, **options):
    return Planner(ROOT, SIZE, Options(**options), layers_at_once, may_background)


def keys_of(tokens):
    return extend_keys(ROOT, [], tokens, SIZE)


def found(plan, now, request_id, blocks, ssd_blocks=0):
    assert plan.question(now, request_id)
    plan.answered(request_id, LeadingRun(blocks, blocks - ssd_blocks, ssd_blocks))


def test_a_hit_is_loaded_after_what_the_engine_has_and_the_rest_is_saved():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    assert plan.match(0.0, "a", SIZE) == Match(None)
    assert plan.question(0.0, "a") == keys_of(PROMPT)
    assert plan.question(0.0, "a") == ()
    assert plan.match(0.1, "a", SIZE) == Match(None)
    plan.answered("a", LeadingRun(3, 3))
    assert plan.match(0.1, "a", SIZE) == Match(2 * SIZE, False)
    assert plan.match(0.1, "a", SIZE) == Match(2 * SIZE, False)  # asked again when there was no room
    plan.allocated("a", [7, 8, 9, 10, 11], 2 * SIZE)
    work = plan.step([Row("a", 3 * SIZE, 6, [7, 8, 9, 10, 11])])
    (load,) = work.loads
    assert (load.request_id, load.keys, load.block_ids) == ("a", keys_of(PROMPT)[1:3], [8, 9])
    (save,) = work.saves
    assert (save.keys, save.block_ids, save.position) == (keys_of(PROMPT)[3:4], [10], 3)
    assert plan.step([]).loads == []


def test_a_lookup_is_as_old_as_its_question():
    """A request may wait long for a place in the batch, and its lookup is made when it arrives."""
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    assert plan.question(0.0, "a")
    plan.answered("a", LeadingRun(3))  # long ago, but nobody has asked before
    assert plan.question(FRESH_S + 0.1, "a")
    assert plan.match(FRESH_S + 0.1, "a", 0) == Match(None)
    plan.answered("a", LeadingRun(1))
    assert plan.match(FRESH_S + 0.1, "a", 0).tokens == SIZE


def test_the_last_token_is_always_computed():
    plan = planner()
    tokens = list(range(4 * SIZE))
    plan.arrived(0.0, "a", tokens)
    assert plan.question(0.0, "a") == keys_of(tokens)[:3]
    plan.answered("a", LeadingRun(3))
    assert plan.match(0.0, "a", 0).tokens == 3 * SIZE
    plan.arrived(0.0, "short", [1, 2, 3, 4])
    assert plan.question(0.0, "short") == ()
    assert plan.match(0.0, "short", 0) == Match(0)


def test_chunks_and_answers_are_saved_as_their_blocks_fill_and_only_once():
    plan = planner()
    tokens = list(PROMPT)
    plan.arrived(0.0, "a", tokens)
    found(plan, 0.0, "a", 0)
    assert plan.match(0.0, "a", 0) == Match(0)
    blocks = list(range(20, 40))
    saved = []
    computed = 0
    for chunk in (6, 5, 7):
        for save in plan.step([Row("a", computed, chunk, blocks)]).saves:
            saved += zip(save.keys, save.block_ids, strict=True)
        computed += chunk
    for _ in range(8):
        tokens.append(random.randrange(1000))
        for save in plan.step([Row("a", computed, 1, blocks)]).saves:
            saved += zip(save.keys, save.block_ids, strict=True)
        computed += 1
    assert saved == list(zip(keys_of(tokens[:computed]), blocks, strict=False))


def test_a_block_waits_for_tokens_that_are_not_known_yet():
    """The engine may schedule a token before the one in front of it is drawn."""
    plan = planner()
    tokens = [1, 2, 3]
    plan.arrived(0.0, "a", tokens)
    assert plan.match(0.0, "a", 0) == Match(0)
    assert not plan.step([Row("a", 0, 3, [5])]).saves
    assert not plan.step([Row("a", 3, 1, [5])]).saves  # its fourth token is drawn by the step before
    tokens += [4, 5]
    (save,) = plan.step([Row("a", 4, 1, [5, 6])]).saves
    assert (save.keys, save.block_ids) == (keys_of(tokens), [5])


@pytest.mark.parametrize(("save", "blocks"), [("all", 6), ("prompt", 4), ("none", 0)])
def test_what_is_saved_is_an_option(save, blocks):
    plan = planner(save=save)
    tokens = list(PROMPT)
    plan.arrived(0.0, "a", tokens)
    assert plan.match(0.0, "a", 0) == Match(None)
    found(plan, 0.0, "a", 0)
    plan.match(0.0, "a", 0)
    tokens += range(6)
    work = plan.step([Row("a", 0, len(tokens), list(range(9)))])
    assert sum(len(one.keys) for one in work.saves) == blocks


def test_blocks_that_the_engine_has_and_the_pool_has_lost_are_saved_again():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 1)
    assert plan.match(0.0, "a", 3 * SIZE) == Match(0)
    (save,) = plan.step([Row("a", 3 * SIZE, 6, list(range(5)))]).saves
    assert (save.position, save.block_ids) == (1, [1, 2, 3])


def test_after_a_failed_load_the_blocks_are_computed_and_saved_and_looked_up_anew():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 3)
    assert plan.match(0.0, "a", 0).tokens == 3 * SIZE
    plan.allocated("a", [5, 6, 7, 8, 9], 3 * SIZE)
    assert plan.step([Row("a", 3 * SIZE, 6, [5, 6, 7, 8, 9])]).failures_known == 0
    plan.load_failed([6])
    work = plan.step([Row("a", SIZE, len(PROMPT) - SIZE, [5, 6, 7, 8, 9])])  # the engine goes back to block 1
    assert work.failures_known == 1
    assert [(save.position, save.block_ids) for save in work.saves] == [(1, [6, 7, 8])]
    assert plan.match(0.0, "a", 0) == Match(None)  # preempted: what the pool has is not believed any more
    found(plan, 0.0, "a", 3)
    assert plan.match(0.0, "a", 0).tokens == 3 * SIZE
    for _ in range(ATTEMPTS - 1):
        plan.allocated("a", [5, 6, 7], 3 * SIZE)
        plan.load_failed([5, 6, 7])
    assert plan.question(9.0, "a") == ()
    assert plan.match(9.0, "a", 0) == Match(0)


def test_failures_of_others_change_nothing():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 3)
    plan.match(0.0, "a", 0)
    plan.allocated("a", [5, 6, 7], 3 * SIZE)
    plan.load_failed([])
    plan.load_failed([8])
    assert plan.match(0.0, "a", 0).tokens == 3 * SIZE


def test_a_preempted_request_starts_anew():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 0)
    plan.match(0.0, "a", 0)
    assert plan.step([Row("a", 0, 18, list(range(5)))]).saves
    assert plan.question(FRESH_S + 0.1, "a")
    assert plan.match(FRESH_S + 0.1, "a", 0) == Match(None)
    plan.answered("a", LeadingRun(4))
    assert plan.match(FRESH_S + 0.2, "a", 0).tokens == 4 * SIZE
    plan.allocated("a", list(range(5)), 4 * SIZE)
    work = plan.step([Row("a", 4 * SIZE, 2, list(range(5)))])
    assert len(work.loads) == 1 and not work.saves


def test_a_pool_that_does_not_answer_costs_a_moment():
    plan = planner(lookup_s=0.5)
    plan.arrived(0.0, "a", PROMPT)
    plan.question(0.0, "a")
    assert plan.match(0.4, "a", 0) == Match(None)
    assert plan.match(0.6, "a", 2 * SIZE) == Match(0)
    work = plan.step([Row("a", 2 * SIZE, 10, list(range(5)))])
    assert [(one.position, len(one.keys)) for one in work.saves] == [(2, 2)]
    plan.arrived(0.0, "b", PROMPT)
    plan.question(0.0, "b")
    plan.answered("b", None)
    assert plan.match(0.1, "b", 0) == Match(0)
    assert plan.counts["lookups_late"] == plan.counts["lookups_failed"] == 1


def test_a_consumer_waits_for_its_producer_until_a_deadline():
    plan = planner(wait_s=5.0)
    plan.arrived(0.0, "a", PROMPT, wait_blocks=None)
    plan.arrived(0.0, "b", PROMPT, wait_blocks=2)
    plan.arrived(0.0, "late", PROMPT, wait_blocks=99)
    for name in ("a", "b", "late"):
        found(plan, 0.0, name, 2)
    assert plan.match(0.0, "a", 0) == Match(None)
    assert plan.match(0.0, "b", 0).tokens == 2 * SIZE
    assert plan.question(0.001, "a") == ()
    found(plan, 0.9, "a", 3)
    assert plan.question(0.91, "a") == ()  # it has waited long, so it asks less often
    found(plan, 1.0, "a", 4)
    assert plan.match(1.0, "a", 0).tokens == 4 * SIZE
    assert plan.match(0.0, "late", 0) == Match(None)
    found(plan, 5.1, "late", 3)
    assert plan.match(5.1, "late", 0).tokens == 3 * SIZE
    assert (plan.counts["waits"], plan.counts["waits_in_vain"]) == (2, 1)


def test_a_consumer_that_has_the_blocks_itself_waits_for_nobody():
    plan = planner(wait_s=5.0)
    plan.arrived(0.0, "a", PROMPT, wait_blocks=None)
    found(plan, 0.0, "a", 0)
    assert plan.match(0.0, "a", 4 * SIZE) == Match(0)
    assert plan.counts["waits"] == 0


def test_loads_go_between_steps_when_others_would_wait_for_them():
    plan = planner(layers_at_once=3)
    for name, blocks, ssd in (("small", 3, 0), ("large", 4, 0), ("disk", 3, 1)):
        plan.arrived(0.0, name, PROMPT)
        found(plan, 0.0, name, blocks, ssd)
    assert [plan.match(0.0, name, 0).background for name in ("small", "large", "disk")] == [False, True, True]
    plan.step([Row("small", 12, 6, list(range(5)))])
    assert not plan.match(0.0, "small", 0).background
    plan.step([Row("large", 16, 2, list(range(5)))])
    assert plan.match(0.0, "small", 0).background
    plan.finished("large")
    assert not plan.match(0.0, "small", 0).background
    assert len(plan) == 2


@pytest.mark.parametrize(("load", "may", "expected"), [("layers", True, False), ("background", True, True)])
def test_the_way_of_loads_is_an_option(load, may, expected):
    plan = planner(load=load, may_background=may)
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 3)
    assert plan.match(0.0, "a", 0).background is expected


def test_a_producer_never_loads_between_steps():
    plan = planner(load="background", may_background=False)
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 3)
    assert not plan.match(0.0, "a", 0).background


def test_salts_roots_and_ranks_have_keys_of_their_own():
    plan = planner()
    asked = set()
    for name, salt in (("a", ""), ("b", "x"), ("c", "y")):
        plan.arrived(0.0, name, PROMPT, salt)
        asked.update(plan.question(0.0, name))
    plan.new_root(bytes(15) + b"\1")
    plan.arrived(0.0, "d", PROMPT)
    asked.update(plan.question(0.0, "d"))
    assert len(asked) == 16
    keys = keys_of(PROMPT)
    assert rank_keys(keys, 0, 1) == keys
    shares = [tuple(rank_keys(keys, rank, ranks)) for ranks in (2, 4) for rank in range(ranks)]
    assert len({key for share in shares for key in share} | set(keys)) == 7 * len(keys)


def test_a_finished_request_leaves_nothing():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    plan.question(0.0, "a")
    plan.match(0.0, "a", 0)
    plan.finished("a")
    plan.answered("a", LeadingRun(3))
    plan.finished("a")
    plan.allocated("a", [1], SIZE)
    assert plan.match(0.0, "a", 0) == Match(0)
    work = plan.step([Row("a", 0, 18, list(range(5)))])
    assert not work.loads and not work.saves and len(plan) == 0


def test_the_tiers_of_a_hit():
    plan = planner()
    plan.arrived(0.0, "a", PROMPT)
    found(plan, 0.0, "a", 4, ssd_blocks=1)
    assert plan.sources("a", 3 * SIZE) == (2 * SIZE, SIZE)
    assert plan.sources("unknown", 5) == (5, 0)
