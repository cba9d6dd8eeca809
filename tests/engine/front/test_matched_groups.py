"""What digests say of models whose layers are in groups: how far a node can go on, not only what group 0 has."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.block import BlockGeometry
from cache.layer_groups import LayerGroups, group_key, layer_groups
from cache.pool.block_pool import BlockPool
from cache.pool.borders import MAX_BORDERS, MAX_PLACES, Borders, borders_of
from engine.core.batcher import Batcher, BatchRules
from engine.handoff import arenas as arenas_module
from engine.handoff.arenas import Arenas
from sched.gossip.digest import CuckooDigest, assemble, key64
from sched.gossip.holders import Holders
from sched.placement.match import Matcher
from tests.engine.toy_model import EOS, request, run_dry

SIZE, INTERVAL = 4, 3
PLAIN = BlockGeometry(2, 2, 8, SIZE, "float32")


def of(windows: Any, states: Any = ()) -> LayerGroups:
    found = layer_groups(windows, states, 3 * PLAIN.layer_bytes, PLAIN.layer_bytes)
    assert found is not None
    return replace(found, state_interval=INTERVAL)


WINDOWS = of([0, 9, 9, 14])
STATES = of((), [True, True, False])
BOTH = of([6, 0, 0], [False, False, True])


class Node:
    """A node's arena, and what its digest tells."""

    def __init__(self, groups: LayerGroups, blocks: int) -> None:
        rules = BatchRules(True, groups=groups, state_interval=groups.state_interval)
        self.batcher = Batcher(BlockPool(blocks), SIZE, 4, 32, 1000, {EOS}, rules)
        self.digest = CuckooDigest(epoch=1)
        self.batcher.pool.watch(self.cached, places=True)

    def cached(self, key: bytes, held: bool) -> None:
        (self.digest.add if held else self.digest.discard)(key64(key))

    def ask(self, prompt: list[int], answer: int) -> list[int]:
        """The prompt and its answer, from the prefix that is here."""
        one = request("r", prompt, max_tokens=answer)
        self.batcher.add(0, one)
        run_dry(self.batcher)
        return one.token_ids

    def exact(self, keys: list[bytes]) -> int:
        return len(self.batcher.blocks.match_keys(keys))

    def forget(self, key: bytes) -> None:
        assert self.batcher.pool.forget(key)


def gossiped(*nodes: Node) -> Holders:
    holders = Holders()
    for number, node in enumerate(nodes):
        while node.digest.take_delta() is not None:
            pass
        holders.admit(f"n{number}")
        if (copy := assemble(node.digest.pages())) is not None:
            holders.load(f"n{number}", *copy)
    return holders


def told(groups: LayerGroups, keys: list[bytes], *nodes: Node) -> list[float]:
    """Blocks by node, as placement sees them."""
    holders = gossiped(*nodes)
    found = Matcher(lambda: holders, Borders(groups, SIZE)).depths(keys, SIZE, np.arange(len(nodes)))
    return [0.0] * len(nodes) if found is None else [depth / SIZE for depth in found]


def keys_of(prompt: list[int]) -> list[bytes]:
    return request("r", prompt).block_keys(SIZE)[: (len(prompt) - 1) // SIZE]


TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=6)


COMPUTED_AGAIN = [(1, 32, 12), (0, 1, 1), (0, 26, 4), (0, 1, 1), (1, 37, 1), (1, 8, 1)]
"""With states, the first node goes on before block 10 and computes it again: it must not leave before block 11."""


@pytest.mark.parametrize("groups", [WINDOWS, STATES, BOTH])
@example(COMPUTED_AGAIN, 90)
@given(TURNS, st.integers(90, 130))
@settings(max_examples=60, deadline=None)
def test_a_node_is_never_said_to_go_on_where_it_cannot(groups, turns, blocks):
    """Small arenas evict blocks of windows and states and keep those of tokens. Up to 12 blocks, depths are exact."""
    nodes, texts = [Node(groups, blocks), Node(groups, 2 * blocks)], [[1], [2], [3]]
    for number, (text, more, answer) in enumerate(turns):
        prompt = [*texts[text][:40], *(1 + (7 * i + text) % 40 for i in range(more))]
        texts[text] = nodes[number % 2].ask(prompt, answer)
    for text in texts:
        keys = keys_of([*text, 5])
        exact = [node.exact(keys) for node in nodes]
        found = told(groups, keys, *nodes)
        assert all(known <= can for known, can in zip(found, exact, strict=True))
        if len(keys) <= 12:
            assert found == exact


@pytest.mark.parametrize("groups", [WINDOWS, STATES])
def test_a_node_that_lost_what_goes_on_is_not_matched(groups):
    """Two nodes computed the prompt; one loses a block of one group other than 0 at its end, and keeps all of 0."""
    nodes = [Node(groups, 200), Node(groups, 200)]
    prompt = [1 + i % 30 for i in range(4 * 11 + 1)]
    for node in nodes:
        node.ask(prompt, 2)
    keys = keys_of(prompt)
    assert told(groups, keys, *nodes) == [11, 11]
    last = len(groups.windows) - 1
    nodes[0].forget(group_key(keys[-1], last))
    before = 9 if groups is STATES else 10
    if groups is WINDOWS:  # a window of 14: its four last blocks are needed behind each border
        nodes[0].forget(group_key(keys[6], last))
        before = 6
    assert nodes[0].exact(keys) == before and len(nodes[0].batcher.pool.match(keys)) == 11
    assert told(groups, keys, *nodes) == [before, 11]


def test_a_long_chat_goes_on_where_its_last_answer_ended():
    """The border is no twelfth of the prompt; the digest shows where the node's KV ends."""
    node = Node(STATES, 2000)
    text = node.ask([1 + i % 30 for i in range(4 * 51 + 2)], 9)
    border = (len(text) - 1) // SIZE
    keys = keys_of([*text, *range(1, 200)])
    assert len(keys) > 100 and node.exact(keys) == border
    assert told(STATES, keys, node) == [border]


def test_an_arena_helps_as_far_as_its_windows_reach():
    """With what this node holds of the prompt itself."""
    here, there = Node(WINDOWS, 300), Node(WINDOWS, 300)
    prompt = [1 + i % 30 for i in range(4 * 20 + 1)]
    there.ask(prompt, 1)
    here.ask(prompt[: 4 * 8 + 1], 1)
    keys = keys_of(prompt)
    arenas = Arenas("me", lambda: gossiped(there), lambda node: True, Borders(WINDOWS, SIZE))
    plain = Arenas("me", lambda: gossiped(there), lambda node: True)
    assert arenas.beyond(keys, 8) == plain.beyond(keys, 8) == {"n0": 12}
    there.forget(group_key(keys[7], 1))  # it is here
    assert arenas.beyond(keys, 8) == {"n0": 12}
    there.forget(group_key(keys[18], 1))
    assert plain.beyond(keys, 8) == {"n0": 12} and arenas.beyond(keys, 8) == {"n0": 10}
    for place in range(8, 18):
        there.forget(group_key(keys[place], 1))
    assert arenas.beyond(keys, 8) == {}


class Asked(Holders):
    """Records the borders of the last question."""

    def reached(self, wanted: Any, among: int) -> list[tuple[int, int]]:
        found = list(wanted)
        self.borders = [border for border, _ in found]
        return super().reached(found, among)


def ending_at(depths: Any, keys: list[bytes], groups: LayerGroups) -> Asked:
    """Nodes that hold all of the prompt up to these depths."""
    holders, firsts = Asked(), {groups.same_window(group)[0] for group in range(1, len(groups.windows))}
    for number, depth in enumerate(depths):
        digest = CuckooDigest(epoch=1)
        for key in keys[:depth]:
            for name in (key, *(group_key(key, group) for group in firsts)):
                digest.add(key64(name))
        while digest.take_delta() is not None:
            pass
        holders.admit(f"n{number}")
        holders.load(f"n{number}", *assemble(digest.pages()))
    return holders


@pytest.mark.parametrize("groups", [WINDOWS, STATES])
def test_however_many_nodes_hold_a_prompt_the_work_of_one_question_is_bounded(groups):
    """Each node ends at another border. The deepest ones are exact; of the others, the last border tried counts."""
    depths = [11 + 37 * i % 120 for i in range(120)]
    keys = keys_of([1 + i % 39 for i in range(4 * 140 + 1)])
    holders, lines = ending_at(depths, keys, groups), 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename == arenas_module.__file__ else None

    arenas = Arenas("me", lambda: holders, lambda node: True, Borders(groups, SIZE))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = arenas.beyond(keys, 10)
    finally:
        sys.settrace(before)
    assert 12 < len(holders.borders) <= MAX_BORDERS and lines < 10 * (len(depths) + MAX_BORDERS)
    assert set(found.values()) <= {border - 10 for border in holders.borders}
    for number, depth in enumerate(depths):
        told = 10 + found.get(f"n{number}", 0)
        assert told == max((border for border in holders.borders if border <= depth), default=10)
        assert told == depth or depth <= max(depths) - MAX_BORDERS // 2


def test_of_a_wide_window_some_places_are_asked_for():
    groups = of([0, 400])
    assert borders_of(PLAIN) is None
    borders = borders_of(replace(PLAIN, groups=groups))
    assert borders is not None
    keys = [bytes([i]) * 16 for i in range(200)]
    ((border, names),) = borders.wanted(keys, [150])
    wanted = list(names)
    places = [place for place in range(200) if group_key(keys[place], 1) in wanted]
    assert border == 150 and len(wanted) == 1 + MAX_PLACES == 1 + len(places)
    assert wanted[0] == keys[149] and (places[0], places[-1]) == (groups.first_needed(1, 600, SIZE), 149)
