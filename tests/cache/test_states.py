"""States among groups of layers: their parts, which places of a table have one, and prefixes that end at one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.block import BlockGeometry
from cache.groups import Group
from cache.keys import root_key
from cache.layer_groups import STATE, StatePlaces, layer_groups, servable, state_pieces
from cache.results import LeadingRun

SIZE = 4
KINDS = st.lists(st.booleans(), min_size=2, max_size=12).filter(lambda kinds: any(kinds) and not all(kinds))


def geometry(kinds: list[bool], state_bytes: int) -> BlockGeometry:
    """Layers of two KV heads of 8: 512 bytes in a block; True: a layer with a state."""
    groups = layer_groups((), kinds, state_bytes, 2 * 2 * SIZE * 8 * 4)
    assert groups is not None
    return BlockGeometry(groups.layers, 2, 8, SIZE, "float32", groups=groups)


@given(KINDS, st.integers(1, 700).map(lambda n: 4 * n))
def test_the_layers_share_no_byte_and_leave_less_than_a_block(kinds, state_bytes):
    g = geometry(kinds, state_bytes)
    seen: set[tuple[int, int]] = set()
    for layer, has_state in enumerate(kinds):
        pieces = g.pieces(layer)
        assert sum(nbytes for *_, nbytes in pieces) == (state_bytes if has_state else g.layer_bytes)
        for group, offset, nbytes in pieces:
            assert (g.groups.windows[group] == STATE) == has_state and offset + nbytes <= g.block_bytes
            span = {(group, at) for at in range(offset, offset + nbytes, 4)}
            assert not span & seen
            seen |= span
    assert g.state_blocks == g.groups.num_states == -(-sum(kinds) * state_bytes // g.block_bytes)
    assert g.num_groups == 1 + g.state_blocks


def test_qwen3_next():
    """36 states of 2 MiB and the inputs of a convolution, in blocks of 16 tokens of 12 layers."""
    kinds = [(layer + 1) % 4 != 0 for layer in range(48)]
    state_bytes = 32 * 128 * 128 * 4 + 3 * 8192 * 2
    groups = layer_groups((), kinds, state_bytes, 2 * 2 * 16 * 256 * 2)
    assert groups is not None and groups.layers == 12
    g = BlockGeometry(12, 2, 256, 16, "bfloat16", groups=groups)
    assert 36 * state_bytes == 77_266_944 and g.state_blocks == -(-77_266_944 // g.block_bytes) == 197
    assert g.handover_blocks(1000) == 63 + 197
    assert state_pieces(1, state_bytes, g.block_bytes)[0] == (5, state_bytes % g.block_bytes, 212_992)


def test_windows_and_states():
    """Layers without states are grouped by their windows, as without those that have one."""
    groups = layer_groups([0, 8, 0, 0, 8], [False, False, True, False, False], 64, 128)
    assert groups is not None
    assert groups.windows == (0, 8, STATE) and groups.layers == 2
    assert groups.places == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))


def test_keys_name_the_states():
    kinds = [True, False]
    roots = {root_key("m", geometry(kinds, size)) for size in (64, 128)}
    assert len(roots) == 2


@given(st.integers(1, 400), st.integers(0, 6), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_a_request_has_the_states_it_needs(prompt, interval, sizes):
    """Steps of any sizes: before each there is the state that it starts from; afterwards those at all borders at which
    it must be saved were left, and the last border's is still there."""
    places = StatePlaces(SIZE, interval)
    held: dict[int, int] = {}  # place -> tokens of the state in it
    saved, tokens = set(), 0
    for count in sizes:
        for place in [place for place in held if place < places.first_kept(tokens)]:
            del held[place]
        if tokens:
            assert held[(tokens - 1) // SIZE] == tokens
        end = tokens + count
        for place in places.written(prompt, tokens, end):
            assert place not in held or held[place] % SIZE, "the state of a border is never written again"
            held[place] = min((place + 1) * SIZE, end)
        for place in held:
            if place in range(tokens // SIZE, -(-end // SIZE)):
                held[place] = min((place + 1) * SIZE, end)
        assert len(held) <= places.most(max(sizes))
        saved |= {place for place, of in held.items() if of == (place + 1) * SIZE and places.saves(prompt, place)}
        tokens = end
        if border := tokens // SIZE:
            assert held[border - 1] == border * SIZE
    wanted = {place for place in range(tokens // SIZE) if places.saves(prompt, place)}
    assert saved == wanted
    for place in range(20):
        later = [one for one in range(place, 500) if places.saves(prompt, one)]
        assert places.next_saved(prompt, place) == (later[0] if later else None)


def test_what_a_request_needs_is_what_cache_groups_says():
    g = geometry([True, False, True], 400)
    group = Group(kind="state", layers=2, state_bytes=400)
    for tokens in (1, 4, 5, 100):
        needed = g.handover_blocks(tokens) - -(-tokens // SIZE)
        assert needed * g.block_bytes >= group.held_bytes(tokens, SIZE) > (needed - 1) * g.block_bytes


@given(st.integers(0, 20), st.integers(0, 20), st.sets(st.integers(0, 20)))
def test_a_prefix_ends_where_a_state_is(run, held, there):
    groups = layer_groups((), [True, False], 4 * 512, 512)
    assert groups is not None and groups.num_states == 4
    held = min(held, run)
    expected = max((place + 1 for place in there if held <= place < run), default=held)
    found = servable(groups, run, held, SIZE, lambda group, place: place in there)
    assert found == expected
    missing_part = servable(groups, run, held, SIZE, lambda group, place: place in there and group != 3)
    assert missing_part == held


@pytest.mark.parametrize(
    ("run", "ends", "expected"),
    [
        (LeadingRun(5, 5), [False, True, False, False, False], LeadingRun(2, 2)),
        (LeadingRun(5, 3, 2, 0.5), [False, True, False, False, True], LeadingRun(5, 2, 2, 0.5)),
        (LeadingRun(5, 3, 2, 0.5), [False, True, False, False, False], LeadingRun(2, 2)),
        (LeadingRun(5, 5), [False] * 5, LeadingRun(0, 0)),
        (LeadingRun(2, 1, 1, 0.5), [True, False, True], LeadingRun(1, 1)),
    ],
)
def test_a_run_in_the_pool_ends_where_a_state_is(run, ends, expected):
    assert run.up_to(ends) == expected
