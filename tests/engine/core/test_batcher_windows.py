"""The batcher with groups of layers: whatever is reused, preempted and given back, every row finds what it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.layer_groups import GONE, group_key, layer_groups
from cache.pool.block_pool import BlockPool, IntegrityError
from engine.core.batcher import Batcher, BatchRules
from engine.core.kv_ready import OVERLAPS, KvReady, KvTarget
from engine.step.step import Step
from tests.engine.core.test_kv_ready import GEOMETRY as UNIFORM
from tests.engine.toy_model import EOS, alone, request, run_dry, run_step

SIZE, BUDGET = 4, 16
GROUPS = layer_groups([0, 6, 6, 11])  # three groups: all tokens, 6 twice as one group each, 11
assert GROUPS is not None


def grouped(blocks: int, seqs: int = 4, caching: bool = True) -> Batcher:
    rules = BatchRules(caching, groups=GROUPS)
    return Batcher(BlockPool(blocks), SIZE, seqs, BUDGET, 1000, {EOS}, rules)


class Memory:
    """What the model writes: of every slot, its group and the tokens up to its own."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

    def compute(self, step: Step) -> None:
        for row in step.rows:
            tokens = row.request.token_ids
            for group, table in enumerate([row.request.block_ids, *row.request.others]):
                for at in range(row.start, row.start + row.num_tokens):
                    self.slots[table[at // SIZE], at % SIZE] = group, tuple(tokens[: at + 1])
        for row in step.rows:
            for at in range(row.start, row.start + row.num_tokens):
                self.check(row.request, at)

    def check(self, request, at: int) -> None:
        """The token at `at` sees what it should, in every group."""
        for group, table in enumerate([request.block_ids, *request.others]):
            window = GROUPS.windows[group]
            for seen in range(max(0, at - window + 1) if window else 0, at + 1):
                wanted = group, tuple(request.token_ids[: seen + 1])
                assert self.slots[table[seen // SIZE], seen % SIZE] == wanted


PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(PROMPTS, st.integers(56, 90), st.booleans())
def test_every_row_finds_what_it_sees(prompts, blocks, caching):
    """(length, which of three texts, tokens to make) of each; texts share their beginnings."""
    b, memory = grouped(blocks, caching=caching), Memory()
    wanted = {}
    for number, (length, text, count) in enumerate(prompts):
        prompt = [1 + i % 7 for i in range(min(20, length))] + [text + 10 + i % 5 for i in range(max(0, length - 20))]
        wanted[f"r{number}"] = alone(prompt, count)
        b.add(number, request(f"r{number}", prompt, number, max_tokens=count))
    found = dict(b.requests)
    for now in range(2000):
        for one in b.loads(now, 4):
            b.blocks.adopt_prefix(one)
            b.loaded(now, one)
        step = b.schedule(now)
        if step is None:
            break
        memory.compute(step)
        b.check_integrity()
        b.pool.check_request_owners(b.held_blocks())
        for row in step.rows:
            for group, table in enumerate(row.request.others, 1):
                held = sum(block != GONE for block in table)
                assert len(table) == len(row.request.block_ids)
                assert held <= -(-GROUPS.windows[group] // SIZE) + BUDGET // SIZE + 2
        run_step(b, now, step)
    assert {name: list(one.output_ids) for name, one in found.items()} == wanted
    assert b.pool.usage()["held"] == 0


def test_a_prefix_is_found_again_in_every_group():
    b = grouped(90)
    for name in ("a", "b"):
        one = request(name, list(range(1, 50)), max_tokens=3)
        b.add(0, one)
        for r in b.loads(0, 4):
            b.loaded(0, r)
        run_dry(b)
    assert one.num_cached == 48


def test_a_long_prompt_needs_a_window_only():
    """40 blocks of tokens in an arena that could not hold them in every group."""
    b = grouped(80)
    one = request("a", [1 + i % 9 for i in range(160)], max_tokens=20)
    b.add(0, one)
    run_dry(b)
    assert one.finish_reason == "length" and len(GROUPS.windows) * 40 > 80


@given(st.integers(1, 60), st.integers(0, 3), st.sets(st.integers(1, 60)), st.sampled_from(OVERLAPS))
def test_only_what_the_decode_node_needs_leaves(tokens, cached, cuts, overlap):
    """All of it, once whole, and nothing that it has no block for."""
    geometry = replace(UNIFORM, num_layers=GROUPS.layers, groups=GROUPS)
    receiver, sender = grouped(200), grouped(200)
    there, here = request("r", [1] * tokens), request("r", [1] * tokens)
    receiver.blocks.take_all(there)
    target = KvTarget("d", "kv", there.block_ids, 0, "", there.others)
    ready = KvReady(geometry, target, tokens, overlap)
    landed: dict[tuple[int, int], int] = {}  # (block there, layer in it) -> tokens
    start = min(cached * SIZE, (tokens - 1) // SIZE * SIZE)
    if start:
        sender.blocks.extend(here, start)
        here.num_computed = start
    for end in sorted({cut for cut in cuts if start < cut < tokens} | {tokens}):
        sender.blocks.extend(here, end - start)
        for layer in range(geometry.model_layers):
            tables = [list(table) for table in here.others]
            for piece in ready.layer_done(list(here.block_ids), layer, start, end, tables):
                assert piece.block_id != GONE and piece.remote >= 0
                block, offset = divmod(piece.remote, geometry.block_bytes)
                first = offset // geometry.layer_bytes
                for one in range(first, first + piece.nbytes // geometry.layer_bytes):
                    landed[block, one] = piece.tokens
        here.num_computed = start = end
    wanted = {}
    for layer in range(geometry.model_layers):
        ((group, offset, _),) = geometry.pieces(layer)
        place = offset // geometry.layer_bytes
        table = [there.block_ids, *there.others][group]
        wanted |= {(block, place): min(SIZE, tokens - SIZE * i) for i, block in enumerate(table) if block != GONE}
    assert landed == wanted
    assert len({block for block, _ in wanted}) == geometry.handover_blocks(tokens)


@pytest.mark.parametrize("length", [3, 9, 40, 41, 57])
def test_only_the_ends_of_windows_are_published(length):
    """All blocks are named in the arena; of windows, those that the prompt's last border does not need stay there."""
    every, ends = ({}, {})
    for pools_ends, published in ((False, every), (True, ends)):
        rules = BatchRules(True, groups=replace(GROUPS, pools_ends=pools_ends))
        b = Batcher(BlockPool(200), SIZE, 4, BUDGET, 1000, {EOS}, rules)
        b.add(0, request("r", [1 + i % 7 for i in range(length)], 0, max_tokens=12))
        for one in b.loads(0, 4):
            b.loaded(0, one)
        for now in range(100):
            step = b.schedule(now)
            if step is None:
                break
            published |= {key: block for key, block, _ in run_step(b, now, step).named}
        assert all(b.pool.lookup(key) is not None for key in every)
    chain = request("r", [1 + i % 7 for i in range(length)], 0).block_keys(SIZE)
    for place, key in enumerate(chain):
        assert key in every and key in ends
        for group in range(1, len(GROUPS.windows)):
            needed = place >= GROUPS.first_needed(group, (length - 1) // SIZE * SIZE, SIZE)
            assert (group_key(key, group) in ends) == needed and group_key(key, group) in every


def test_a_leak_in_one_group_is_not_hidden_by_another():
    """A table of group 2 gives its own block back and claims one that group 1 has lost: the sums agree."""
    b = grouped(90)
    one = request("a", list(range(1, 15)), max_tokens=9)
    b.add(0, one)
    for r in b.loads(0, 4):
        b.loaded(0, r)
    step = b.schedule(0)
    b.check_integrity()
    assert {b.pool.group_of(block) for block in one.others[1]} == {2}
    leaked, place = one.others[0].pop(), len(one.others[0])
    own, one.others[1][place] = one.others[1][place], leaked
    b.pool.release([own])
    b.pool.check_integrity()
    b.pool.check_request_owners(b.held_blocks())  # every reference has an owner, and every owner a reference
    with pytest.raises(IntegrityError, match=f"a: place {place} of group 2 has block {leaked} of group 1"):
        b.blocks.check_groups(one)
    with pytest.raises(IntegrityError, match="a lacks blocks of group 1"):
        b.check_integrity()
    assert step is not None


def test_an_account_of_each_group():
    b = grouped(90)
    one = request("a", list(range(1, 30)), max_tokens=9)
    b.add(0, one)
    run_dry(b)
    usage = b.pool.usage_by_group()
    assert set(usage) == {0, 1, 2, 3}
    assert sum(each["cached"] for each in usage.values()) == b.pool.usage()["cached"]
    lost = b.pool.lookup(group_key(one.block_keys(SIZE)[-1], 1))
    b.pool.acquire([lost])
    with pytest.raises(IntegrityError, match=rf"unknown requests: group 1: \[{lost}\]"):
        b.pool.check_request_owners(b.held_blocks())
