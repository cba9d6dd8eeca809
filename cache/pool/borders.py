"""Block borders at which a prompt can go on with what another node holds, as far as its digest tells. Pure.

A digest has the keys of group 0, and of the other groups a name for each place at which all groups of one window (or
all parts of the states) have their block: the key of the first of them (cache/pool/prefix.py). After a border, a node
can go on if it has the key of group 0 in front of it, whose predecessors it has too, and the names of all places that
the next token needs. Of a wide window only some places are asked for: its first, its last, and some between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cache.block import BlockGeometry, BlockKey
from cache.layer_groups import LayerGroups, group_key

MAX_BORDERS = 48
"""Borders that are tried for one prompt. At most half of them are multiples of the stride."""

MAX_PLACES = 16
"""Places of a window that are asked for."""


class Borders:
    """Of prompts of a model whose layers are in groups."""

    def __init__(self, groups: LayerGroups, block_size: int) -> None:
        self._groups = groups
        self._block_size = block_size
        self._firsts = sorted({groups.same_window(group)[0] for group in range(1, len(groups.windows))})

    @property
    def has_states(self) -> bool:
        return self._groups.num_states > 0

    def below(self, deepest: int, stride: int, ends: Iterable[int]) -> list[int]:
        """Borders to try, in blocks, the last one first; no node has more than `deepest`. They are the multiples of
        `stride`, and the deepest of `ends`, where what a node holds ends: there the prompt or the answer of another
        request may have ended, which leaves a state. With states, prompts save others at intervals: the last ones are
        tried too. Many nodes may end at as many borders, so no more than MAX_BORDERS // 2 ends are tried."""
        found = {*range(stride, deepest + 1, stride)}
        found |= set(sorted({end for end in ends if 0 < end <= deepest})[-(MAX_BORDERS // 2) :])
        if self._groups.num_states and (interval := self._groups.state_interval):
            saved = range(deepest // interval * interval, 0, -interval)
            found |= set(saved[: max(0, MAX_BORDERS - len(found))])
        return sorted(found, reverse=True)

    def wanted(
        self, keys: Sequence[BlockKey], borders: Iterable[int], held: int = 0
    ) -> Iterator[tuple[int, Iterator[BlockKey]]]:
        """(border, what a node must have to go on there) of each; the caller has the first `held` blocks, and what the
        other groups need there."""
        return ((border, self._names(keys, border, held)) for border in borders)

    def _names(self, keys: Sequence[BlockKey], border: int, held: int) -> Iterator[BlockKey]:
        yield keys[border - 1]
        for group in self._firsts:
            first = max(held, self._groups.first_needed(group, border * self._block_size, self._block_size))
            for place in _some(first, border):
                yield group_key(keys[place], group)


def borders_of(geometry: BlockGeometry) -> Borders | None:
    """None: the model has one group."""
    return None if geometry.groups is None else Borders(geometry.groups, geometry.block_size)


def _some(first: int, end: int) -> Iterable[int]:
    """At most MAX_PLACES of range(first, end), evenly, with both ends; the first ones last."""
    count = end - first
    if count <= MAX_PLACES:
        return range(end - 1, first - 1, -1)
    return (end - 1 - i * (count - 1) // (MAX_PLACES - 1) for i in range(MAX_PLACES))
