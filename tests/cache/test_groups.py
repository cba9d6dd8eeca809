"""Groups: each rule against the definition of its kind, position by position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.groups import Group, Groups, PoolRule

tokens = st.integers(0, 600)
sizes = st.integers(1, 40)
windows = st.integers(1, 200)


def full(layers: int = 2, row_bytes: int = 10) -> Group:
    return Group(kind="full", layers=layers, row_bytes=row_bytes)


def window(seen: int, layers: int = 3, row_bytes: int = 7) -> Group:
    return Group(kind="window", layers=layers, row_bytes=row_bytes, window=seen)


STATE = Group(kind="state", layers=4, state_bytes=1000)
groups = st.one_of(windows.map(window), st.just(full()), st.just(STATE))


def seen_by(group: Group, position: int) -> range:
    """The positions before `position` that a token there attends to."""
    return range(max(0, position - group.window + 1) if group.window else 0, position)


@given(seen=st.none() | windows, known=tokens, size=sizes)
def test_the_next_token_needs_the_blocks_that_it_sees_and_the_one_that_it_joins(seen, known, size):
    group = window(seen) if seen else full()
    wanted = {position // size for position in seen_by(group, known)}
    if known % size:
        wanted.add(known // size)
    assert set(group.needed(known, size)) == wanted
    assert group.held_bytes(known, size) == len(wanted) * size * group.token_bytes


@given(seen=windows, prompt=st.integers(1, 600), size=sizes, chunk=st.integers(1, 300))
def test_the_peak_of_a_window_is_its_fullest_chunk(seen, prompt, size, chunk):
    group, most = window(seen), 0
    for begin in range(0, prompt, chunk):
        end = min(prompt, begin + chunk)
        live = {position // size for position in range(begin, end)} | set(group.needed(begin, size))
        most = max(most, len(live))
    peak = group.peak_bytes(prompt, size, chunk)
    assert peak == most * size * group.token_bytes
    assert group.held_bytes(prompt, size) <= peak <= full(group.layers, group.row_bytes).held_bytes(prompt, size)


@given(group=groups, prefix=tokens, known=tokens, size=sizes)
def test_a_fetch_brings_what_is_needed_and_not_known(group, prefix, known, size):
    prefix, known = prefix // size * size, known // size * size
    fetched = group.fetched_bytes(prefix, known, size, PoolRule())
    if prefix <= known:
        assert fetched == 0
    elif group is STATE:
        assert fetched == STATE.checkpoint_bytes
    else:
        missing = {position // size for position in seen_by(group, prefix) if position >= known}
        assert fetched == len(missing) * size * group.token_bytes
    assert fetched <= group.held_bytes(prefix, size)


@given(prompt=tokens, size=sizes, every=st.integers(1, 12))
def test_the_pool_has_full_blocks_and_states_at_borders(prompt, size, every):
    rule, blocks = PoolRule(state_every=every), prompt // size
    states = {block for block in range(1, blocks + 1) if block % every == 0 or block == blocks}
    assert STATE.pooled_bytes(prompt, size, rule) == len(states) * STATE.checkpoint_bytes
    assert window(50).pooled_bytes(prompt, size, rule) == blocks * size * window(50).token_bytes
    assert window(50).pooled_bytes(prompt, size, PoolRule(windows=False)) == 0


@given(found=st.integers(0, 100), size=sizes, every=st.integers(1, 12), seen=windows, pooled=st.booleans())
def test_a_prefix_ends_where_every_group_can_go_on(found, size, every, seen, pooled):
    rule, found = PoolRule(pooled, every), found * size
    model = Groups((full(), window(seen), STATE), rule)
    border = model.border(found, size)
    assert 0 <= border <= found and border % (every * size) == 0
    depth = 0 if pooled else 3 * (seen - 1)
    assert border == 0 or border + depth <= found
    assert border + every * size + depth > found, "the next border would do as well"
    assert Groups((full(),), rule).border(found, size) == found
    assert Groups((full(), window(seen)), PoolRule()).border(found, size) == found


@given(layers=st.integers(1, 5), seen=st.integers(1, 9), prefix=st.integers(1, 60))
def test_windows_that_are_not_pooled_are_right_after_this_many_tokens(layers, seen, prefix):
    """The KV that token `prefix` sees, computed again from `start` on, by what each layer's input depends on."""

    def right(start: int) -> bool:
        good = set(range(start, prefix))  # positions with a right input of the layer
        for _ in range(layers):
            if not good.issuperset(range(max(0, prefix - seen + 1), prefix)):
                return False
            good = {at for at in good if good.issuperset(range(max(0, at - seen + 1), at + 1))}
        return True

    last = max(start for start in range(prefix + 1) if right(start))
    model = Groups((full(), window(seen, layers)), PoolRule(windows=False))
    assert last == max(0, prefix - model.depth)


@given(held=tokens, seen=windows)
def test_a_decode_step_reads_what_it_sees(held, seen):
    assert window(seen).step_bytes(held) == min(held, seen) * 21
    assert full().step_bytes(held) == held * 20
    assert STATE.step_bytes(held) == 2 * STATE.checkpoint_bytes, "read and written"


def test_a_state_needs_memory_twice_while_it_is_computed():
    assert STATE.peak_bytes(5000, 16, 512) == 2 * STATE.held_bytes(5000, 16) == 8000


def test_a_model_adds_up_its_groups():
    model = Groups((full(), window(100), STATE), PoolRule(state_every=8))
    assert model.token_bytes == 20
    assert model.fixed_bytes == 99 * 21 + 4000
    assert model.held_bytes(1000, 1) == 1000 * 20 + 99 * 21 + 4000
    assert model.fetched_bytes(1000, 950, 1) == 50 * 20 + 50 * 21 + 4000
    assert model.block_bytes(16) == 16 * (20 + 21) + 4000 / 8


WRONG = [
    {"kind": "full", "layers": 0, "row_bytes": 1},
    {"kind": "full", "layers": 1},
    {"kind": "latent", "layers": 1, "row_bytes": 1, "window": 5},
    {"kind": "window", "layers": 1, "row_bytes": 1},
    {"kind": "window", "layers": 1, "row_bytes": 1, "window": -5},
    {"kind": "state", "layers": 1, "row_bytes": 1, "state_bytes": 1},
    {"kind": "state", "layers": 1},
]


@pytest.mark.parametrize("fields", WRONG)
def test_what_is_no_group(fields):
    with pytest.raises(ValueError, match="not a group"):
        Group(**fields)


def test_what_is_no_model():
    with pytest.raises(ValueError, match="without groups"):
        Groups(())
    with pytest.raises(ValueError, match="every 0 blocks"):
        PoolRule(state_every=0)
