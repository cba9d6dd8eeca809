"""The run of a prompt's blocks that the pool can give back, for a model with or without states."""

from __future__ import annotations

from collections.abc import Sequence

from cache.block import BlockKey
from cache.layer_groups import LayerGroups, group_key
from cache.results import LeadingRun
from cache.store.store import Store


async def leading_run(store: Store, keys: Sequence[BlockKey], groups: LayerGroups | None) -> LeadingRun:
    """The leading run of `keys` in the pool. With states among `groups`, it ends at a border at which the pool has a
    state, by its first part: the others were stored with it."""
    run = await store.find(keys)
    if groups is None or not groups.num_states or not run.blocks:
        return run
    return run.up_to(await store.exists_many([group_key(key, groups.first_state) for key in keys[: run.blocks]]))
