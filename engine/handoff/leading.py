"""The run of a prompt's blocks that the pool can give back, for a model in which some layers limit its end."""

from __future__ import annotations

from collections.abc import Sequence

from cache.block import BlockKey
from cache.layer_groups import LayerGroups, group_key
from cache.results import LeadingRun
from cache.store.store import Store


async def leading_run(
    store: Store, keys: Sequence[BlockKey], groups: LayerGroups | None, first: int, block_size: int
) -> LeadingRun:
    """The leading run of `keys` in the pool, which name the blocks first, first + 1, ... of a prompt; all before them
    are here. It, and its part in DRAM, end at borders at which every group of the model can go on with what the pool
    has: with states, where it has one, by its first part: the others were stored with it; with windows, where it has
    their last blocks."""
    whole = await store.find(keys)
    if groups is None or not whole.blocks:
        return whole
    keys, ends = keys[: whole.blocks], [True] * whole.blocks
    if groups.num_states:
        ends = await _exist(store, keys, [groups.first_state])
    run, others = whole.up_to(ends), range(1, groups.first_state)
    if not others or not run.blocks:
        return run
    if not groups.pools_ends:  # probably both ends have what their windows need, which is few blocks
        last = set[int]()
        for count in {run.blocks, run.dram_blocks} - {0}:
            needed = min(groups.first_needed(group, (first + count) * block_size, block_size) for group in others)
            last |= {*range(max(0, needed - first), count)}
        if all(await _exist(store, [keys[place] for place in sorted(last)], others)):
            return run
    here = await _exist(store, keys, others)
    present = [here[at : at + len(keys)] for at in range(0, len(here), len(keys))]
    windows = groups.window_ends(present, first, block_size)
    return whole.up_to([state and window for state, window in zip(ends, windows, strict=True)])


async def _exist(store: Store, keys: Sequence[BlockKey], groups: Sequence[int]) -> list[bool]:
    """Whether the pool has each of these blocks of the groups, one group after the other."""
    return await store.exists_many([group_key(key, group) for group in groups for key in keys])
