"""Keeps track of the pool blocks that each request holds. Pure.

A model whose layers are in groups has a table for each (cache/layer_groups.py). Blocks that a window has left are given
back before the next ones are taken, so what a request holds in such a group does not grow with its length; nor do its
states (state_tables.py).

Only this class takes and releases block references for requests: first on the longest cached prefix, then on fresh
blocks as tokens are computed. It names blocks when they become full and releases all blocks at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.block import BlockKey
from cache.layer_groups import GONE, LayerGroups, StatePlaces, group_key, servable
from cache.pool.block_pool import BlockPool, IntegrityError, OutOfBlocks
from cache.pool.policy import Facts
from cache.pool.prefix import Place
from engine.step.cold import Cold, Lodged
from engine.step.request import Request
from engine.step.state_tables import StateTables


class BlockBook:
    """Keeps `block_ids`, `num_computed` and `num_named` of requests in step with the pool."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_caching: bool = True,
        recompute_s: Callable[[int, int], float] = lambda tokens, context: 1.0,
        groups: LayerGroups | None = None,
        step_tokens: int = 0,
        state_interval: int = 0,
    ) -> None:
        """recompute_s(tokens, context): seconds to compute `tokens` tokens after `context` others. groups: None = one.
        step_tokens: the most tokens that a step computes of one request. state_interval: blocks between two saved
        states of a prompt; 0 = only at ends."""
        self._groups = groups
        self._others = range(1, 1 if groups is None else len(groups.windows))
        self._windows = range(1, 1 if groups is None else groups.first_state)
        self._same_window = {group: groups.same_window(group) for group in self._others if groups is not None}
        self._states: StateTables | None = None
        if groups is not None and groups.num_states:
            self._states = StateTables(pool, groups, StatePlaces(block_size, state_interval), step_tokens)
        self._step_tokens = step_tokens
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.changes = 0  # of num_computed by this class
        self._recompute_s = recompute_s
        self._named: Callable[[Request, Sequence[int]], None] | None = None

    def watch(self, named: Callable[[Request, Sequence[int]], None]) -> None:
        """Call `named(request, positions)` when blocks of a request at these positions become reusable."""
        self._named = named

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep states, so that the step after accepted drafts computes these again."""
        return self._states is not None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- taking

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest prefix in the pool, without the last known token, whose logits are needed."""
        if not self.prefix_caching or request.cold is not None:
            return []
        return self.match_keys(request.block_keys(self.block_size)[: (request.num_tokens - 1) // self.block_size])

    def match_keys(self, keys: Sequence[BlockKey], *, states: bool = True) -> list[int]:
        """Blocks of group 0 for the longest leading part of `keys` after which every group can go on. states: whether
        that needs a state, because none is sent here."""
        run = self.pool.match(keys)
        return run if self._groups is None else run[: self._servable(keys, len(run), states=states)]

    def _servable(
        self, keys: Sequence[BlockKey], run: int, request: Request | None = None, *, states: bool = True
    ) -> int:
        """As servable(), with what the pool has and what `request` holds."""
        assert self._groups is not None
        held = 0 if request is None else len(request.block_ids)

        def present(group: int, place: int) -> bool:
            if group not in self._windows and not states:
                return True
            if request is not None and place < held:
                return request.others[group - 1][place] != GONE
            return self.pool.lookup(group_key(keys[place], group)) is not None

        return servable(self._groups, run, held, self.block_size, present)

    def adopt_prefix(self, request: Request) -> int:
        """Take references on the longest prefix in this pool, or extend it since the last call. Returns the number of
        blocks that the request holds. Call it only before the request's first step."""
        assert not request.finished, "only unfinished requests give their blocks back"
        held = len(request.block_ids)
        if _has_some_layers(request) or request.cold is not None:
            return held
        if (
            self.prefix_caching and not request.scores_prompt and request.num_named == held
        ):  # blocks that are still arriving have no names
            keys = request.block_keys(self.block_size)
            if more := self.pool.match(keys[held : (request.num_tokens - 1) // self.block_size]):
                if self._groups is not None:
                    self._open(request)
                    more = more[: self._servable(keys, held + len(more), request) - held]
                self.pool.acquire(more)
                request.block_ids = request.block_ids + more
                self._adopt_others(request, keys)
                request.num_named = len(request.block_ids)
                request.num_computed = request.num_named * self.block_size
                self.changes += 1
        return len(request.block_ids)

    def _open(self, request: Request) -> None:
        """An empty table for each of the other groups."""
        if not request.others:
            request.others = [[] for _ in self._others]

    def _adopt_others(self, request: Request, keys: Sequence[BlockKey]) -> None:
        """Bring the tables of other groups to the length of group 0's with blocks that `servable` has found."""
        end = len(request.block_ids)
        for group in self._others:
            assert self._groups is not None
            table = request.others[group - 1]
            first = self._groups.first_needed(group, end * self.block_size, self.block_size)
            for place in range(len(table), end):
                block = self.pool.lookup(group_key(keys[place], group)) if place >= first else GONE
                assert block is not None, "found by servable"
                if block != GONE:
                    self.pool.acquire([block])
                table.append(block)
        self._give_old(request, end * self.block_size, gaps=True)

    def _give_old(self, request: Request, num_tokens: int, *, gaps: bool = False) -> None:
        """Give back what the next token after `num_tokens` tokens does not need. gaps: older blocks may lie behind some
        that are gone."""
        for group in self._windows:
            assert self._groups is not None
            table = request.others[group - 1]
            first = self._groups.first_needed(group, num_tokens, self.block_size)
            for place in range(min(first, len(table)) - 1, -1, -1):
                if table[place] != GONE:
                    self.pool.release([table[place]])
                    table[place] = GONE
                elif not gaps:
                    break  # and so are those before it
        if self._states is not None:
            self._states.give_old(request, num_tokens, gaps=gaps)

    def _reuses(self, request: Request) -> bool:
        """Whether the request may use cached blocks. A prompt with prompt log probabilities is computed in full."""
        plain = not _has_some_layers(request) and request.cold is None
        return self.prefix_caching and not request.scores_prompt and plain

    def computes_next(self, request: Request, other: Request) -> bool:
        """Whether `other`, a prompt that is being computed, has yet to compute the block that `request` needs next;
        with states, the block at whose end it saves one for both."""
        position: int | None = len(request.block_ids)
        if self._states is not None:
            first = max(len(request.block_ids), other.num_computed // self.block_size)
            position = self._states.places.next_saved(other.num_prompt_tokens, first)
        if not self._reuses(request) or position is None or position >= (request.num_tokens - 1) // self.block_size:
            return False
        if not other.num_computed // self.block_size <= position < other.num_tokens // self.block_size:
            return False
        return request.block_keys(self.block_size)[position] == other.block_keys(self.block_size)[position]

    def lodge(self, request: Request, lodged: Lodged, slots: Sequence[int], spare: Sequence[int]) -> None:
        """The tier has room for a request whose KV exceeds the arena: see Cold.lodge."""
        assert request.cold is not None and not request.block_ids
        request.cold.lodge(lodged, slots, spare)
        request.num_computed = request.cold.cold_tokens
        self.changes += 1

    def others_to_load(self, request: Request, count: int) -> list[tuple[int, int, BlockKey]]:
        """Blocks of other groups that the request lacks to go on after `count` more blocks of group 0: (group, place,
        key) of each."""
        if self._groups is None:
            return []
        self._open(request)
        keys, held, end = request.block_keys(self.block_size), len(request.block_ids), len(request.block_ids) + count
        lacking = []
        for group in self._others:
            first = self._groups.first_needed(group, end * self.block_size, self.block_size)
            table = request.others[group - 1]
            lacking += [
                (group, place, group_key(keys[place], group))
                for place in range(first, end)
                if place >= held or table[place] == GONE
            ]
        return lacking

    def adopt_loaded(
        self, request: Request, block_ids: Sequence[int], others: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Append blocks that hold the next part of the prefix; the request takes over their references. others: (group,
        place, block) of all that `others_to_load` said for them."""
        self.adopt_arriving(request, block_ids)
        for table in request.others:
            table += [GONE] * (len(request.block_ids) - len(table))
        for group, place, block in others:
            self.pool.assign([block], group)
            request.others[group - 1][place] = block
        self._give_old(request, request.num_computed, gaps=True)
        self.name_full(request)
        self.name_last_state(request)

    def adopt_arriving(self, request: Request, block_ids: Sequence[int]) -> None:
        """Append blocks that are still arriving. Call `name_full`, which names them, only after they have arrived."""
        assert not request.finished, "only unfinished requests give their blocks back"
        request.block_ids.extend(block_ids)
        request.num_computed = len(request.block_ids) * self.block_size
        self.changes += 1

    def take_all(self, request: Request) -> int:
        """Take blocks for all known tokens of a request that has none: n cached blocks, then fresh ones. Returns n.
        Raises OutOfBlocks and then changes nothing."""
        end, keys = self.blocks_for(request.num_tokens), request.block_keys(self.block_size)
        reusable = keys[: (request.num_tokens - 1) // self.block_size] if self.prefix_caching else []
        matched = self.match_keys(reusable, states=False)
        tables = [list(matched)]
        for group in self._others:
            assert self._groups is not None
            first = self._groups.first_needed(group, request.num_tokens, self.block_size)
            found = [self.pool.lookup(group_key(keys[i], group)) for i in range(first, len(matched))]
            tables.append([GONE] * min(first, end) + [block for block in found if block is not None])
        taken = [block for table in tables for block in table if block != GONE]
        self.pool.acquire(taken)
        try:
            fresh = self.pool.allocate(sum(end - len(table) for table in tables))
        except OutOfBlocks:
            self.pool.release(taken)
            raise
        for group, table in enumerate(tables):
            lacking = end - len(table)
            table += fresh[:lacking]
            if group:
                self.pool.assign(fresh[:lacking], group)
            del fresh[:lacking]
        request.block_ids, *request.others = tables
        request.num_named = len(matched)
        return len(matched)

    def lacks(self, request: Request) -> int:
        """Number of blocks that the known tokens of the request still need, of all groups at once at most."""
        if request.cold is not None:
            return request.cold.arena_blocks - len(request.block_ids) if request.cold.open else 0
        total = missing = self.blocks_for(request.num_tokens) - len(request.block_ids)
        if missing <= 0:
            return total
        for group in self._windows:
            assert self._groups is not None
            held = sum(block != GONE for block in request.others[group - 1]) if request.others else 0
            window = self._groups.windows[group]
            most = self.blocks_for(window) + self.blocks_for(self._step_tokens) + 2 if window else missing + held
            total += max(0, min(missing, most - held))
        return total if self._states is None else total + self._states.lacks(request, missing)

    def extend(self, request: Request, count: int, drafts: int = 0) -> None:
        """Take blocks for `count` more computed tokens, the last `drafts` of which leave no state. Raises OutOfBlocks
        and then takes none; blocks that windows have passed are given back all the same."""
        if request.cold is not None:
            if not request.block_ids:
                request.block_ids = self.pool.allocate(request.cold.arena_blocks)
                request.cold.seat(request.block_ids)
            request.cold.keys = request.block_keys(self.block_size)
            return
        start, end = request.num_settled, request.num_computed + count
        need = self.blocks_for(end) - len(request.block_ids)
        if self._groups is not None:
            self._open(request)
            self._give_old(request, start)
        places = [] if self._states is None else self._states.lacking(request, start, end - drafts)
        if need > 0 or places:
            need = max(0, need)
            of_tokens = need * (1 + len(self._windows))
            of_states = len(places) * (len(self._others) - len(self._windows))
            fresh = self.pool.allocate(of_tokens + of_states)
            request.block_ids += fresh[:need]
            for group in self._windows:
                taken = fresh[group * need : (group + 1) * need]
                self.pool.assign(taken, group)
                request.others[group - 1] += taken
            if self._states is not None:
                self._states.take(request, places, fresh[of_tokens:])

    # --- naming

    def name_full(self, request: Request) -> list[tuple[BlockKey, int, Facts]]:
        """Name the blocks that became full, so that they can be reused. Returns (key, block id, facts for eviction) of
        those whose key no other block has, and which the pool may keep."""
        if request.cold is not None:
            self._name_cold(request, request.cold)
            return []
        full = request.num_settled // self.block_size
        unnamed = request.private or _has_some_layers(request)
        if not self.prefix_caching or unnamed or full <= request.num_named:
            return []
        first = request.num_named
        full_blocks = self.named(request, first, full)
        request.num_named = full
        name = self.pool.name_again
        fresh = [i for i, (key, block_id, facts) in enumerate(full_blocks) if name(block_id, key, facts)]
        if self._named is not None and fresh:
            self._named(request, [first + i for i in fresh])
        others = [
            (key, block_id, facts)
            for group, i, (key, block_id, facts) in self._named_others(request, first, full)
            if name(block_id, key, facts, self._place(request, group, i)) and self._pools(request, group, i)
        ]
        return [full_blocks[i] for i in fresh] + others

    def _place(self, request: Request, group: int, position: int) -> Place:
        first, count = self._same_window[group]
        return Place(group_key(request.block_keys(self.block_size)[position], first), count)

    def _pools(self, request: Request, group: int, position: int) -> bool:
        assert self._groups is not None
        return self._groups.pools(group, position, request.num_prompt_tokens, self.block_size)

    def _name_cold(self, request: Request, cold: Cold) -> None:
        """Name the blocks that the last step has moved to the tier, and tell it what the step took."""
        if cold.lodged is None:
            return
        keys = request.block_keys(self.block_size)
        for place, slot, checksum in cold.take_moved():
            if self.prefix_caching and not request.private:
                cold.lodged.name(keys[place], slot, checksum, self.facts(request, place))
        if cold.ran is not None:
            cold.lodged.ran(*cold.ran)
            cold.ran = None

    def named(self, request: Request, first: int, end: int) -> list[tuple[BlockKey, int, Facts]]:
        """(key, block id, facts for eviction) of the request's blocks [first, end)."""
        keys = request.block_keys(self.block_size)
        return [(keys[i], request.block_ids[i], self.facts(request, i)) for i in range(first, end)]

    def _named_others(
        self, request: Request, first: int, end: int
    ) -> list[tuple[int, int, tuple[BlockKey, int, Facts]]]:
        """The same of the other groups, of which the request still has some, and of states those that are saved: each
        with its group and position."""
        keys = request.block_keys(self.block_size)
        return [
            (group, i, (group_key(keys[i], group), table[i], self.facts(request, i)))
            for group, table in enumerate(request.others, 1)
            for i in range(first, end)
            if table[i] != GONE and (group in self._windows or (self._states and self._states.saves(request, i)))
        ]

    def name_last_state(self, request: Request) -> list[tuple[BlockKey, int, Facts]]:
        """Name the state at the last block border of a request that ends or loses its blocks, so that another one, or
        the same one later, can go on there. Returns what name_full returns."""
        if self._states is None or request.private or not self.prefix_caching:
            return []
        place, parts = self._states.last(request)
        named = []
        for group, block_id in parts:
            key, facts = group_key(request.block_keys(self.block_size)[place], group), self.facts(request, place)
            if self.pool.lookup(key) is None:
                self.pool.name(block_id, key, facts, self._place(request, group, place))
                named.append((key, block_id, facts))
        return named

    def facts(self, request: Request, position: int) -> Facts:
        """Facts for eviction about the request's block at `position`."""
        cost_s = self._recompute_s(self.block_size, position * self.block_size)
        return Facts(position, cost_s, request.service_class)

    # --- giving back

    def settle(self, request: Request, num_tokens: int) -> None:
        """A step has left the states of the request, if the model keeps any, behind its first `num_tokens` tokens."""
        if self._states is not None:
            request.state_lag = max(0, request.num_computed - num_tokens)

    def cut(self, request: Request, num_tokens: int) -> None:
        """Keep the first `num_tokens` computed tokens of a request, in whole blocks, and release the other blocks."""
        keep = num_tokens // self.block_size
        self.pool.release(request.block_ids[keep:])
        request.block_ids = request.block_ids[:keep]
        request.num_computed = keep * self.block_size
        request.num_named = min(request.num_named, keep)
        self.changes += 1

    def release(self, request: Request) -> None:
        """Release all blocks. Named blocks can still be found until they are evicted. Cold blocks stay with a request
        that goes on."""
        self.name_last_state(request)
        self.pool.release(request.held_blocks)
        request.block_ids, request.others = [], []
        request.num_computed = request.state_lag = 0
        request.num_named = 0
        if request.apart is not None:
            request.apart.passed(0, 0)
        if request.cold is not None:
            request.cold.unseat()
            if request.finished:
                request.cold.close()
            request.num_computed = request.cold.cold_tokens
        self.changes += 1

    def check_tables(self, request: Request) -> None:
        """Raises IntegrityError unless the tables of all groups are as long as that of group 0 and have the blocks that
        the next token of the request needs, and check_groups finds nothing."""
        for group in self._others if request.others else ():
            assert self._groups is not None
            table, tokens = request.others[group - 1], request.num_settled
            first = self._groups.first_needed(group, tokens, self.block_size)
            needed = table[first : self.blocks_for(tokens)] if tokens else []
            if len(table) != len(request.block_ids) or GONE in needed:
                raise IntegrityError(f"{request.request_id} lacks blocks of group {group} behind {tokens} tokens")
        self.check_groups(request)

    def check_groups(self, request: Request) -> None:
        """Raises IntegrityError if a block in the table of one group belongs to another: then the count of one group's
        references would hide what the other has lost."""
        for group, table in enumerate((request.block_ids, *request.others)):
            for place, block in enumerate(table):
                if block != GONE and (owner := self.pool.group_of(block)) != group:
                    raise IntegrityError(
                        f"{request.request_id}: place {place} of group {group} has block {block} of group {owner}"
                    )


def _has_some_layers(request: Request) -> bool:
    """Whether the blocks that the request fills lack layers, so that no key may name them."""
    return request.part is not None and request.part.begun
