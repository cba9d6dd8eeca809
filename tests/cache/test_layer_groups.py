"""Groups of layers, and the longest prefix after which all of them can go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.groups import Group
from cache.layer_groups import LayerGroups, group_key, layer_groups, servable

SIZE = 4
WINDOWS = st.lists(st.sampled_from([0, 1, 5, 8, 20]), min_size=1, max_size=30)


@given(WINDOWS)
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows):
    groups = layer_groups(windows)
    if groups is None:
        assert len(set(windows)) == 1 or 0 not in windows
        return
    assert len(set(groups.places)) == len(groups.places) == len(windows)
    assert groups.windows[0] == 0
    for window, (group, place) in zip(windows, groups.places, strict=True):
        assert groups.windows[group] == window and 0 <= place < groups.layers


def test_published_models():
    """gpt-oss: two equal groups. Gemma 3 27B: 10 full layers and six groups of up to 10."""
    assert layer_groups([128, 0] * 18) == LayerGroups((0, 128), tuple((1 - i % 2, i // 2) for i in range(36)), 18)
    gemma = layer_groups([1024 if (i + 1) % 6 else 0 for i in range(62)])
    assert gemma is not None and gemma.layers == 10 and gemma.windows == (0,) + (1024,) * 6


@given(st.integers(0, 200), st.integers(1, 30))
def test_what_a_window_needs_is_what_cache_groups_says(tokens, window):
    groups = LayerGroups((0, window), ((0, 0), (1, 0)), 1)
    wanted = Group(kind="window", layers=1, row_bytes=1, window=window).needed(tokens, SIZE)
    assert groups.first_needed(1, tokens, SIZE) == wanted.start
    assert groups.needed(tokens, SIZE) == wanted.stop + len(wanted)


@given(st.integers(0, 30), st.data())
def test_servable_is_the_longest_prefix_that_every_group_serves(run, data):
    """Against trying every length."""
    groups = LayerGroups((0, 5, 12), ((0, 0), (1, 0), (2, 0)), 1)
    held = data.draw(st.integers(0, run))
    there = [set(data.draw(st.lists(st.integers(0, 30), max_size=40))) for _ in range(2)]

    def serves(count: int) -> bool:
        starts = [groups.first_needed(group, count * SIZE, SIZE) for group in (1, 2)]
        return all(i in there[group] for group, start in enumerate(starts) for i in range(start, count))

    expected = next((count for count in range(run, held, -1) if serves(count)), held)
    assert servable(groups, run, held, SIZE, lambda group, place: place in there[group - 1]) == expected


def at_ends(*windows: int) -> LayerGroups:
    return LayerGroups((0, *windows), tuple((group, 0) for group in range(len(windows) + 1)), 1, pools_ends=True)


@given(st.integers(1, 120), st.integers(0, 60), st.lists(st.integers(2, 30), min_size=1, max_size=3))
def test_a_pool_of_ends_has_what_goes_on_at_the_end_of_the_prompt_and_behind_and_no_more(prompt, answer, windows):
    groups, end = at_ends(*windows), (prompt - 1) // SIZE
    for group in range(1, len(windows) + 1):
        kept = {place for place in range((prompt + answer) // SIZE) if groups.pools(group, place, prompt, SIZE)}
        needed = range(groups.first_needed(group, end * SIZE, SIZE), end)
        assert kept.issuperset(needed) and min(kept, default=end) >= needed.start
        for border in range(end, (prompt + answer) // SIZE + 1):
            assert kept.issuperset(range(groups.first_needed(group, border * SIZE, SIZE), border))


@given(st.data(), st.integers(0, 30), st.integers(0, 9), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_run_ends_where_every_window_can_go_on(data, length, first, windows):
    """Against `servable`."""
    groups = at_ends(*windows)
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    present = [data.draw(row) for _ in windows]
    ends = groups.window_ends(present, first, SIZE)
    for place in range(first, first + length):
        run = servable(groups, place + 1, place, SIZE, lambda group, at: at < first or present[group - 1][at - first])
        assert ends[place - first] == (run == place + 1)


@given(WINDOWS, st.integers(0, 20), st.integers(1, 20))
def test_what_a_fetch_brings_of_other_groups(windows, held, more):
    groups = layer_groups(windows)
    if groups is None:
        return
    wanted = sum(
        len([i for i in range(groups.first_needed(group, (held + more) * SIZE, SIZE), held + more) if i >= held])
        for group in range(1, len(groups.windows))
    )
    assert groups.others_fetched(held, held + more, SIZE) == wanted
    assert groups.others_fetched(0, more, SIZE) == groups.needed(more * SIZE, SIZE) - more


def test_groups_of_the_same_window():
    groups = layer_groups([8, 0, 8, 5], [False] * 4 + [True] * 2, 600, 256)
    assert groups is not None and groups.windows == (0, 5, 8, 8, -1, -1, -1, -1, -1)
    assert [groups.same_window(group) for group in range(1, 9)] == [(1, 1), (2, 2), (2, 2), *[(4, 5)] * 5]


def test_keys_name_the_group():
    key = bytes(range(16))
    assert len({key, *(group_key(key, group) for group in range(1, 8))}) == 8
    assert all(len(group_key(key, group)) == 16 for group in (1, 7))


@pytest.mark.parametrize("windows", [[], [0, 0], [8, 8], [8, 5]])
def test_one_group_where_there_is_nothing_to_gain(windows):
    assert layer_groups(windows) is None
