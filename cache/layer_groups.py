"""Layers in groups with a block table each: layers that see all tokens, and layers that see a window. Pure.

All groups have the same number of layers, so all blocks have the same size and share one arena. The windowed layers of
a model with few full layers (Gemma 3: five of six) are several groups; the last group of a window may have unused
layers. Group 0 sees all tokens: its blocks have the keys of the prompt (cache/block.py), those of another group keys
derived from them. A request needs, before token n, in a group with a window of W tokens only the blocks of the last
W - 1 tokens (cache/groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BlockKey = bytes

GONE = -1
"""In a group's table in place of a block that no later token needs."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of one model."""

    windows: tuple[int, ...]  # of each group, in tokens; 0: its layers see all tokens, as those of group 0
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in the group's blocks
    layers: int  # in a block

    def first_needed(self, group: int, tokens: int, block_size: int) -> int:
        """The first block of a group that the next token after `tokens` tokens needs."""
        window = self.windows[group]
        return max(0, tokens - window + 1) // block_size if window else 0

    def needed(self, tokens: int, block_size: int) -> int:
        """Blocks of all groups that a request with `tokens` tokens needs to go on."""
        end = -(-tokens // block_size)
        return sum(end - self.first_needed(group, tokens, block_size) for group in range(len(self.windows)))


def layer_groups(windows: Sequence[int]) -> LayerGroups | None:
    """`windows`: of each layer. None: one group is all there is to have, because no layer or every layer has a
    window."""
    kinds = {window: [layer for layer, one in enumerate(windows) if one == window] for window in sorted(set(windows))}
    if 0 not in kinds or len(kinds) == 1:
        return None
    size = min(len(layers) for layers in kinds.values())
    places = [(0, 0)] * len(windows)
    groups: list[int] = []
    for window, layers in kinds.items():
        for begin in range(0, len(layers), size):
            for place, layer in enumerate(layers[begin : begin + size]):
                places[layer] = len(groups), place
            groups.append(window)
    return LayerGroups(tuple(groups), tuple(places), size)


def group_key(key: BlockKey, group: int) -> BlockKey:
    """The key of a group's block, from the key of the block of group 0 for the same tokens."""
    return blake2b(key + group.to_bytes(2, "little"), digest_size=16, person=b"mooncake-group").digest()


def servable(groups: LayerGroups, run: int, held: int, block_size: int, present: Callable[[int, int], bool]) -> int:
    """The most blocks, at least `held` and at most `run`, after which every group can go on. Group 0 has all `run`;
    present(group, place) says whether another group has a block."""
    count = run
    while count > held:
        missing = -1
        for group in range(1, len(groups.windows)):
            first = groups.first_needed(group, count * block_size, block_size)
            missing = max(missing, next((i for i in range(count - 1, first - 1, -1) if not present(group, i)), -1))
        if missing < 0:
            return count
        count = missing  # no count up to here's end can go on: it would need the missing block
    return held
