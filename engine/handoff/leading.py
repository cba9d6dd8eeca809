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
    are here. With states among `groups`, it ends at a border at which the pool has a state, by its first part: the
    others were stored with it. If the pool keeps the blocks of windows only at ends (--pool-windows ends), it ends
    where the widest window can go on."""
    run = await store.find(keys)
    if groups is None or not run.blocks:
        return run
    if groups.num_states:
        run = run.up_to(await _exist(store, keys[: run.blocks], groups.first_state))
    if groups.pools_ends and run.blocks:
        present = await _exist(store, keys[: run.blocks], groups.widest)
        run = run.up_to(groups.window_ends(present, first, block_size))
    return run


async def _exist(store: Store, keys: Sequence[BlockKey], group: int) -> list[bool]:
    """Whether the pool has each of these blocks of a group."""
    return await store.exists_many([group_key(key, group) for key in keys])
