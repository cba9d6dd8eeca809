"""Every byte of a prompt's KV leaves after it was computed, whatever the overlap and however the prompt was chunked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block import BlockGeometry
from engine.core.kv_ready import OVERLAPS, KvReady, KvTarget

GEOMETRY = BlockGeometry(3, 1, 2, 4, "float32")


@st.composite
def prompts(draw):
    """(tokens, blocks the decode node has, where computing starts, chunk ends)"""
    tokens = draw(st.integers(1, 40))
    found = draw(st.integers(0, (tokens - 1) // 4))
    missing_from = draw(st.integers(0, tokens // 4))
    cuts = draw(st.sets(st.integers(4 * found + 1, tokens)))
    return tokens, missing_from, 4 * found, sorted(cuts | {tokens})


STAGES = ((0, 3), (0, 1), (1, 3), (2, 3))


@given(prompts(), st.sampled_from(OVERLAPS), st.sampled_from(STAGES))
def test_the_last_bytes_to_leave_are_the_final_ones(prompt, overlap, stage):
    tokens, first_missing, start, ends = prompt
    own = range(*stage)
    blocks = -(-tokens // 4)
    here, there = [7 + 2 * i for i in range(blocks)], [90 - i for i in range(blocks)]
    ready = KvReady(GEOMETRY, KvTarget("d", "kv", there, first_missing, ""), tokens, overlap, own)
    size, part = GEOMETRY.block_bytes, GEOMETRY.layer_bytes
    # computed[i][layer]: tokens of block i whose KV is there; landed: what of it the decode node got
    computed = [[4 if 4 * i + 4 <= start else 0] * 3 for i in range(blocks)]
    landed = [[0] * 3 for _ in range(blocks)]
    for end in ends:
        for layer in own:
            for i in range(start // 4, -(-end // 4)):
                computed[i][layer] = min(4, end - 4 * i)
            pieces = ready.layer_done(here, layer, start, end)
            assert ready.completes(layer, end) == (layer == own[-1] and (overlap != "none" or end == tokens))
            if overlap != "layer" and layer < own[-1]:
                assert not pieces
            if overlap == "none" and end < tokens:
                assert not pieces
            for piece in pieces:
                i = here.index(piece.block_id)
                assert i >= first_missing
                assert piece.remote - there[i] * size == piece.local - here[i] * size
                first, count = divmod(piece.local - here[i] * size, part)
                assert count == 0 and piece.nbytes % part == 0
                for one in range(first, first + piece.nbytes // part):
                    landed[i][one] = computed[i][one]
        start = end
    for i in range(first_missing, blocks):
        assert [landed[i][layer] for layer in own] == [computed[i][layer] for layer in own]
        assert not any(landed[i][layer] for layer in range(3) if layer not in own)


def test_layers_leave_one_by_one_and_found_blocks_whole():
    target = KvTarget("d", "kv", [0, 1, 2], 0, "")
    ready = KvReady(GEOMETRY, target, 12, "layer")
    sizes = [[piece.nbytes for piece in ready.layer_done([5, 6, 7], layer, 4, 12)] for layer in range(3)]
    part = GEOMETRY.layer_bytes
    assert sizes == [[GEOMETRY.block_bytes, part, part], [part, part], [part, part]]


def test_an_unknown_overlap_names_the_flag():
    with pytest.raises(ValueError, match="--kv-overlap"):
        KvReady(GEOMETRY, KvTarget("d", "kv", [0], 0, ""), 4, "some")


@given(prompts(), st.sampled_from(OVERLAPS), st.integers(2, 3))
def test_nodes_that_divide_the_tokens_hand_out_every_byte_once(prompt, overlap, nodes):
    """Each node hands out its own chunks, and the first one the known prefix too."""
    tokens, first_missing, start, ends = prompt
    borders = [start, *sorted({end // 4 * 4 for end in ends[:-1]} - {start}), tokens]
    borders = [border for border in borders if border >= start]
    chunks = list(pairwise(sorted(set(borders))))
    blocks = -(-tokens // 4)
    ids = list(range(blocks))
    sent: list[tuple[int, int]] = []
    for node in range(nodes):
        own = chunks[node::nodes]
        if not own:
            continue
        mine = {i for begin, end in own for i in range(begin // 4, -(-end // 4))} | set(range(start // 4 * (node == 0)))
        ready = KvReady(GEOMETRY, KvTarget("d", "kv", ids, first_missing, ""), tokens, overlap, range(3))
        ready.leave_out([i for i in ids if i not in mine], own[-1][1])
        for begin, end in own:
            for layer in range(3):
                for piece in ready.layer_done(ids, layer, begin, end):
                    first, rest = divmod(piece.local - piece.block_id * GEOMETRY.block_bytes, GEOMETRY.layer_bytes)
                    assert rest == 0 and piece.block_id in mine and piece.block_id >= first_missing
                    sent += [(piece.block_id, first + i) for i in range(piece.nbytes // GEOMETRY.layer_bytes)]
        assert ready.completes(2, own[-1][1])
    assert sorted(sent) == [(i, layer) for i in range(first_missing, blocks) for layer in range(3)]
