"""The arena and the tier as one pool: every id leads to the first byte of its block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.step.one_space import OneSpace

PARTS = (2, 2, 3, 16, 16)  # layers, planes, heads, tokens, elements


def memories(blocks: int, slots: int, gap: int, tier_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The arena and the tier in one allocation, `gap` elements apart, in either order."""
    each = int(np.prod(PARTS))
    whole = torch.zeros((blocks + slots) * each + gap)
    first, second = (slots, blocks) if tier_first else (blocks, slots)
    one, other = whole[: first * each], whole[first * each + gap :][: second * each]
    arena, tier = (other, one) if tier_first else (one, other)
    return arena.view(blocks, *PARTS), tier.view(slots * PARTS[0], *PARTS[1:])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4000), st.booleans())
def test_ids_are_addresses(blocks, slots, gap, tier_first):
    arena, tier = memories(blocks, slots, gap, tier_first)
    space = OneSpace(arena, tier)
    assert space.pool.data_ptr() == arena.data_ptr()
    assert space.pool.shape[1:] == arena.shape[1:] and space.pool.stride()[1:] == arena.stride()[1:]
    ids = space.ids(range(slots), range(blocks))
    assert ids.dtype == np.int32
    found = arena.data_ptr() + ids.astype(np.int64) * space.pool.stride(0) * arena.element_size()
    wanted = [tier[slot * PARTS[0]].data_ptr() for slot in range(slots)]
    assert found.tolist() == wanted + [block.data_ptr() for block in arena]


def test_what_is_not_one_space():
    arena, tier = memories(2, 2, 0, False)
    for other in (tier.half(), tier[:, :, :2]):
        with pytest.raises(ValueError, match="differ"):
            OneSpace(arena, other.contiguous())


def test_an_id_has_32_bits():
    arena, tier = memories(1, 1, 0, False)
    far = torch.as_strided(tier, tier.shape, tier.stride(), tier.storage_offset())

    class Far:
        """A tier 2^45 bytes away, an odd number of elements: the unit is one element."""

        dtype, shape = far.dtype, far.shape

        def data_ptr(self):
            return arena.data_ptr() + (1 << 45) + 4

        def stride(self, axis):
            return far.stride(axis)

        def __len__(self):
            return len(far)

    with pytest.raises(ValueError, match="too far for a block id"):
        OneSpace(arena, Far())
