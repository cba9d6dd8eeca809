"""The run of a prompt that the pool can give back to a model whose layers are in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from cache.layer_groups import LayerGroups, group_key, layer_groups, servable
from cache.results import LeadingRun
from cache.store.store import Store
from engine.handoff.leading import leading_run

SIZE = 4
KEYS = [bytes([i]) * 16 for i in range(20)]
WINDOWS = layer_groups([0, 9, 9, 14])
assert WINDOWS is not None


class Pool:
    """A pool with all blocks of group 0, and of the others those that were not lost."""

    def __init__(self, groups: LayerGroups, first: int = 0, dram: int = len(KEYS)) -> None:
        """dram: of the blocks of group 0 that are asked for, how many come before the first that is only on SSD."""
        self.lost = set[tuple[int, int]]()
        self._dram = dram
        self.asked = 0
        self._groups, self._first = groups, first

    async def find(self, keys: Any) -> LeadingRun:
        dram = min(self._dram, len(keys))
        return LeadingRun(len(keys), dram, len(keys) - dram, 1.0 if dram < len(keys) else 0.0)

    async def exists_many(self, keys: Any) -> list[bool]:
        self.asked += len(keys)
        names = {group_key(KEYS[i], g): (g, i) for g in range(1, len(self._groups.windows)) for i in range(len(KEYS))}
        return [names[key] not in self.lost for key in keys]

    async def leading(self, groups: LayerGroups) -> LeadingRun:
        return await leading_run(cast(Store, self), KEYS[self._first :], groups, self._first, SIZE)

    async def run(self, groups: LayerGroups) -> int:
        return (await self.leading(groups)).blocks


@pytest.mark.parametrize("pools_ends", [False, True])
async def test_a_pool_that_lost_blocks_of_a_window_says_so(pools_ends):
    """In any of the groups; what the last window does not see does not matter."""
    groups = replace(WINDOWS, pools_ends=pools_ends)
    pool = Pool(groups)
    assert await pool.run(groups) == 20
    pool.lost = {(3, 15), (1, 17), (2, 0)}
    assert await pool.run(groups) == 20, "14 tokens see 4 blocks behind the end, 9 see 2"
    for lost, left in (
        ({(2, 19)}, 19),
        ({(3, 18)}, 18),
        ({(3, 18), (3, 15)}, 15),  # 16 to 18 blocks would need place 15
        ({(3, 18), (1, 16), (2, 15)}, 15),
        ({(1, place) for place in range(20)}, 0),
    ):
        pool.lost = lost
        assert await pool.run(groups) == left
        assert servable(groups, 20, 0, SIZE, lambda group, place, lost=lost: (group, place) not in lost) == left


async def test_only_the_last_window_is_asked_for_if_it_is_there():
    pool = Pool(WINDOWS)
    await pool.run(WINDOWS)
    assert pool.asked == 3 * 4


@pytest.mark.parametrize("pools_ends", [False, True])
async def test_what_is_in_dram_ends_where_its_windows_go_on(pools_ends):
    """Not only the whole run, which ends on SSD: a request may fetch the part in DRAM alone, and go on there."""
    groups = replace(WINDOWS, pools_ends=pools_ends)
    pool = Pool(groups, dram=12)
    assert await pool.leading(groups) == LeadingRun(20, 12, 8, 1.0)
    for lost, left in (((3, 7), 12), ((1, 11), 11), ((2, 10), 10), ((3, 8), 8)):
        pool.lost = {lost}
        assert await pool.leading(groups) == LeadingRun(20, left, 8, 1.0)
    pool.lost = {(group, place) for group in (1, 2, 3) for place in range(12)}
    assert await pool.leading(groups) == LeadingRun(20, 0, 8, 1.0)


async def test_with_a_part_in_dram_only_the_last_windows_of_both_are_asked_for():
    pool = Pool(WINDOWS, dram=12)
    await pool.leading(WINDOWS)
    assert pool.asked == 3 * (4 + 4)
    pool = Pool(WINDOWS, dram=18)
    await pool.leading(WINDOWS)
    assert pool.asked == 3 * 6, "they overlap"
    pool = Pool(WINDOWS, dram=0)
    await pool.leading(WINDOWS)
    assert pool.asked == 3 * 4


async def test_what_is_here_is_not_asked_for():
    """The caller holds the first 18 blocks, and what the windows need behind them."""
    pool = Pool(WINDOWS, first=18)
    pool.lost = {(3, 17), (1, 17)}
    assert await pool.run(WINDOWS) == 2 and pool.asked == 3 * 2
    pool.lost = {(3, 19)}
    assert await pool.run(WINDOWS) == 1


async def test_with_states_and_windows_it_ends_where_both_go_on():
    groups = layer_groups([6, 0, 0], [False, False, True], 512, 256)
    assert groups is not None and groups.first_state == 2
    pool = Pool(groups)
    pool.lost = {(2, i) for i in range(20) if i not in (4, 11)}
    assert await pool.run(groups) == 12
    pool.lost |= {(1, 11)}
    assert await pool.run(groups) == 5
    assert servable(groups, 20, 0, SIZE, lambda group, place: (group, place) not in pool.lost) == 5
