"""The states in requests' tables: which places have blocks, what is given back, and what is saved for others. Pure.

engine/step/block_book.py owns the tables and the references. cache/layer_groups.py has the rules (StatePlaces).
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.layer_groups import GONE, LayerGroups, StatePlaces
from cache.pool.block_pool import BlockPool
from engine.step.request import Request


class StateTables:
    """Of the groups of states of `groups`; all of them have blocks at the same places."""

    def __init__(self, pool: BlockPool, groups: LayerGroups, places: StatePlaces, step_tokens: int) -> None:
        """step_tokens: the most tokens that a step computes of one request."""
        self.groups = range(groups.first_state, len(groups.windows))
        self.places = places
        self._pool = pool
        self._most = places.most(step_tokens)
        self._step_blocks = -(-step_tokens // places.block_size)

    def _table(self, request: Request) -> list[int]:
        """Of the first group."""
        return request.others[self.groups.start - 1]

    def saves(self, request: Request, place: int) -> bool:
        """See StatePlaces."""
        return self.places.saves(request.num_prompt_tokens, place)

    def lacks(self, request: Request, missing: int) -> int:
        """Blocks that the request needs at once at most for tokens in `missing` more blocks of KV."""
        held = sum(block != GONE for block in self._table(request)) if request.others else 0
        return len(self.groups) * max(0, min(missing, self._most - held))

    def give_old(self, request: Request, num_tokens: int, *, gaps: bool) -> None:
        """Give back what a request with `num_tokens` computed tokens does not keep. gaps: not only what the last step
        has left; older places may have blocks."""
        table, end = self._table(request), self.places.first_kept(num_tokens)
        begin = 0 if gaps else max(0, end - self._step_blocks - 2)
        for place in [i for i in range(begin, min(end, len(table))) if table[i] != GONE]:
            for group in self.groups:
                self._pool.release([request.others[group - 1][place]])
                request.others[group - 1][place] = GONE

    def lacking(self, request: Request, start: int, end: int) -> list[int]:
        """Places without a block for the states that a step over tokens [start, end) leaves."""
        table, wanted = self._table(request), self.places.written(request.num_prompt_tokens, start, end)
        return [place for place in wanted if place >= len(table) or table[place] == GONE]

    def take(self, request: Request, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Put `blocks`, those of one group after those of another, at these places of tables as long as group 0's."""
        for number, group in enumerate(self.groups):
            table = request.others[group - 1]
            table += [GONE] * (len(request.block_ids) - len(table))
            for place, block in zip(places, blocks[number * len(places) :], strict=False):
                self._pool.assign([block], group)
                table[place] = block

    def last(self, request: Request) -> tuple[int, list[tuple[int, int]]]:
        """The last border that the request has passed, and the (group, block) of the state there; none if it has none,
        or its KV up to there has no name."""
        place = request.num_settled // self.places.block_size - 1
        if not request.others or not 0 <= place < request.num_named or self._table(request)[place] == GONE:
            return place, []
        return place, [(group, request.others[group - 1][place]) for group in self.groups]
