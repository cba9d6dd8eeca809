"""WindServe, EcoServe and TaiChi on hand-made clusters: a token costs 1 ms to prefill, a step takes 20 ms."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.admission import Limits
from sched.classes import STANDARD, with_objectives
from sched.placement.phases import LIGHT_CHUNK_TOKENS, prefill_heavy
from sched.placement.table import placements
from sched.placement.view import View
from tests.sched.placement.test_placement import FAST, NOW, decide, demand, node

LATE_S = STANDARD.ttft_s + 1.0
BOTH = ("prefill", "decode")
SLOW = {"running": 9, "step_s": 2 * STANDARD.tbt_s}
TIGHT = {"running": 9, "step_s": 0.99 * STANDARD.tbt_s}


def policy(name: str, slo: str = ""):
    return placements[name](Limits(), random.Random(0), classes=with_objectives(slo))


def test_windserve_lends_decode_nodes_to_prompts_that_would_be_late():
    lent, own = node("lent", BOTH), node("own", ("prefill",), wait_s=1.0)
    assert decide(policy("windserve"), demand(), [lent, own]).prefill == "own", "in time where it belongs"
    late = node("own", ("prefill",), wait_s=LATE_S)
    placed = decide(policy("windserve"), demand(), [lent, late])
    assert (placed.prefill, placed.decode) == ("lent", "lent")
    assert decide(policy("windserve"), demand(), [node("lent", BOTH, **SLOW), late]).prefill == "own", "no time to lend"
    later = node("lent", BOTH, wait_s=2 * LATE_S)
    assert decide(policy("windserve"), demand(), [later, late]).prefill == "own", "even later there"
    assert decide(policy("windserve"), demand(), [node("lent", BOTH, **SLOW)]).prefill == "lent", "there is no other"


def test_other_objectives_make_other_choices():
    lent, own = node("lent", BOTH), node("own", ("prefill",), wait_s=1.0)
    assert decide(policy("windserve", "standard:ttft=0.5"), demand(), [lent, own]).prefill == "lent", "late already"
    assert decide(policy("windserve", "batch:ttft=0.5"), demand(), [lent, own]).prefill == "own", "of another class"
    both = [node("a", BOTH, wait_s=1.0), node("b", BOTH)]
    assert decide(policy("ecoserve"), demand(), both).prefill == "a"
    assert decide(policy("ecoserve", "standard:ttft=2"), demand(), both).prefill == "b", "1.6 s of prefill after 1 s"
    busy = [node(name, BOTH, running=4) for name in ("a", "b")]
    assert decide(policy("taichi"), demand(1601), busy).prefill == "b", "decode-heavy"
    assert decide(policy("taichi", "standard:ttft=1"), demand(1601), busy).prefill == "a", "too late there"


def test_ecoserve_stays_with_the_active_node_until_that_breaks_a_promise():
    chosen = policy("ecoserve")
    calm = [node(name, BOTH) for name in "abc"]
    assert [decide(chosen, demand(), calm).prefill for _ in range(3)] == ["a", "a", "a"], "one phase on one node"
    assert decide(chosen, demand(), calm).decode == "a"
    late = [node("a", BOTH, wait_s=LATE_S), *calm[1:]]
    assert decide(chosen, demand(), late).prefill == "b", "the first token would be late"
    assert decide(chosen, demand(), calm).prefill == "b", "its turn does not go back"
    stalled = [calm[0], node("b", BOTH, **TIGHT), calm[2]]
    assert decide(chosen, demand(), stalled).prefill == "c", "those that decode on b have saved no time"
    full = [calm[0], calm[1], node("c", BOTH, free_blocks=3)]
    assert decide(chosen, demand(), full).prefill == "a", "no room on c; the next one is the first again"
    worst = [node(name, BOTH, wait_s=LATE_S + i) for i, name in enumerate("abc")]
    chosen.active = "c"
    assert decide(chosen, demand(), worst).prefill == "a", "all break one: the least time"


def test_ecoserve_counts_the_time_that_half_an_answer_has_saved():
    wanted = demand(max_tokens=100)  # a step of 50 ms saves 50 ms: 2.5 s in 50 tokens
    busy = {"running": 4, "step_s": STANDARD.tbt_s / 2}
    for wait_s, expected in ((0.8, "a"), (1.0, "b")):  # and 1.6 s of prefill
        nodes = [node("a", BOTH, wait_s=wait_s, **busy), node("b", BOTH)]
        assert decide(policy("ecoserve"), wanted, nodes).prefill == expected


def test_ecoserve_pays_for_every_prefill_and_earns_by_decoding():
    """Requests on a and b can save 2.5 s; a prompt of 1.6 s leaves 0.9 s, and a second of decode earns a second."""
    chosen, wanted = policy("ecoserve"), demand(max_tokens=100)
    nodes = [node(name, BOTH, running=4, step_s=STANDARD.tbt_s / 2) for name in "ab"]

    def placed(now: float) -> str:
        view = View(NOW + now, [one for one, _ in nodes], FAST, 256)
        return chosen.place(NOW + now, wanted, view, np.zeros(2)).prefill

    assert [placed(0.0), placed(0.0)] == ["a", "b"]
    assert placed(1.6 + 0.8) == "b", "0.9 + 0.8 s are enough, and it is b's turn"
    assert placed(1.6 + 0.8) == "a", "b has paid"


def test_the_first_half_by_id_is_prefill_heavy():
    assert prefill_heavy([f"mixed-{i}" for i in range(16)]) == {f"mixed-{i}" for i in range(8)}
    assert prefill_heavy(["b", "a", "c"]) == {"a"}
    assert prefill_heavy(["a"]) == {"a"} and prefill_heavy([]) == set()


def test_taichi_sends_short_prompts_to_decode_heavy_nodes():
    nodes = [node(name, BOTH, running=4) for name in ("a1", "a2", "a3", "a4")]
    heavy, light = {"a1", "a2"}, {"a3", "a4"}
    short, long = demand(1601), demand(8001)
    assert decide(policy("taichi"), short, nodes).prefill in light, "1.6 s, and 7 steps of 20 ms"
    assert decide(policy("taichi"), long, nodes).prefill in heavy, "8 s are too late anyway"
    slow = [*nodes[:2], *[node(name, BOTH, running=4, step_s=0.6) for name in ("a3", "a4")]]
    assert decide(policy("taichi"), short, slow).prefill in heavy, "1.6 s, and 7 steps of 600 ms"
    assert -(-1601 // LIGHT_CHUNK_TOKENS) == 7


def test_taichi_decodes_where_decode_is_calm():
    nodes = [node("a1", BOTH), node("a2", BOTH, step_s=0.09)]
    assert decide(policy("taichi"), demand(8001), nodes).decode == "a2", "decode-heavy, within the objective"
    assert decide(policy("taichi"), demand(8001), [nodes[0], node("a2", BOTH, **SLOW)]).decode == "a1"
    assert decide(policy("taichi"), demand(8001), [nodes[0], node("a2", BOTH, free_blocks=9)]).decode == "a1"


@seed(12)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 12), st.floats(0.01, 0.3), st.integers(0, 20)), min_size=2, max_size=12),
    st.integers(1, 9000),
)
def test_ecoserve_breaks_no_promise_that_some_node_could_keep(states, num_tokens):
    chosen, wanted = policy("ecoserve"), demand(num_tokens)
    nodes = [node(f"n{i:02}", BOTH, wait_s=w, step_s=s, running=r) for i, (w, s, r) in enumerate(states)]
    kept = {
        one.node_id
        for one, _ in nodes
        if (ttft_s := one.wait_s + num_tokens * 1e-3) <= STANDARD.ttft_s
        and (not one.running or ttft_s <= (STANDARD.tbt_s - one.step_s) * wanted.output_tokens / 2)
    }
    placed = decide(chosen, wanted, nodes)
    assert not kept or placed.prefill in kept
    assert placed.prefill == placed.decode


@seed(13)
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["windserve", "ecoserve", "taichi"]),
    st.lists(st.tuples(st.sampled_from([("prefill",), ("decode",), BOTH]), st.floats(0, 9)), min_size=1, max_size=12),
)
def test_none_of_them_fetches(name, states):
    nodes = [node(f"n{i}", roles, wait_s=wait) for i, (roles, wait) in enumerate(states)]
    view = View(NOW, [one for one, _ in nodes], FAST, 256)
    placed = policy(name).place(NOW, demand(pool_tokens=1600), view, np.zeros(len(nodes)))
    assert getattr(placed, "prefix_source", "none") == "none"
