"""Layers in groups with a block table each: layers that see all tokens or a window, and layers with a state. Pure.

All groups have the same number of layers, so all blocks have the same size and share one arena. The windowed layers of
a model with few full layers (Gemma 3: five of six) are several groups; the last group of a window may have unused
layers. Group 0 sees all tokens: its blocks have the keys of the prompt (cache/block.py), those of another group keys
derived from them. A request needs, before token n, in a group with a window of W tokens only the blocks of the last
W - 1 tokens (cache/groups.py).

A layer with a state keeps a number of bytes that does not grow with the tokens. The states of all such layers, one
behind the other, are cut into parts of a block's size, and each part is a group. Its block at place i of the table has
the part as it is after the tokens of block i, or after the last token of a request that ends in it. So a request needs
one block of each such group, and another request goes on at place i if all parts of that place are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BlockKey = bytes

GONE = -1
"""In a group's table in place of a block that no later token needs."""

STATE = -1
"""In place of a window: the group is a part of the states."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of one model; those of states come last."""

    windows: tuple[int, ...]  # of each group, in tokens; 0: its layers see all tokens, as those of group 0; or STATE
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in the group's blocks
    # of a layer with a state: the first of the groups of states, and its number among such layers
    layers: int  # in a block of a group without states
    state_bytes: int = 0  # of the state of one layer; 0: no layer has one
    pools_ends: bool = False  # of windows, the pool keeps only the blocks that go on at or behind the ends of prompts
    state_interval: int = 0  # blocks between two saved states of a prompt, besides those at its ends; 0: only these

    def pools(self, group: int, place: int, prompt_tokens: int, block_size: int) -> bool:
        """Whether a block of a group other than 0, of a request with a prompt of `prompt_tokens` tokens, goes to the
        pool. The end is the last border at which the same prompt can go on, which computes at least one token."""
        if not self.pools_ends or self.windows[group] == STATE:
            return True
        end = (prompt_tokens - 1) // block_size * block_size
        return place >= self.first_needed(group, end, block_size)

    @property
    def has_windows(self) -> bool:
        return max(self.windows) > 0

    def window_ends(self, present: Sequence[Sequence[bool]], first: int, block_size: int) -> list[bool]:
        """After which of the blocks first, first + 1, ... all groups without states can go on. present: of each of them
        but group 0, whether it has each of these blocks; it has what it needs of those before them."""
        ends = [True] * len(present[0])
        for group, of_group in enumerate(present, 1):
            missing = -1
            for at, here in enumerate(of_group):
                missing = missing if here else first + at
                ends[at] &= missing < self.first_needed(group, (first + at + 1) * block_size, block_size)
        return ends

    @property
    def first_state(self) -> int:
        """The first of the groups of states; without states, the number of groups."""
        return self.windows.index(STATE) if self.state_bytes else len(self.windows)

    @property
    def num_states(self) -> int:
        """The number of groups of states."""
        return len(self.windows) - self.first_state

    def same_window(self, group: int) -> tuple[int, int]:
        """The groups other than 0 that need blocks at the same places as `group`, because their windows are the same,
        or because they are the parts of the states: (the first of them, their number)."""
        others, window = self.windows[1:], self.windows[group]
        return 1 + others.index(window), others.count(window)

    def first_needed(self, group: int, tokens: int, block_size: int) -> int:
        """The first block of a group that the next token after `tokens` tokens needs."""
        window = self.windows[group]
        if window == STATE:
            return max(0, tokens - 1) // block_size
        return max(0, tokens - window + 1) // block_size if window else 0

    def others_fetched(self, held: int, blocks: int, block_size: int) -> int:
        """Blocks of the groups other than 0 that come with a prefix of `blocks` blocks to a node that can go on after
        its first `held` blocks."""
        first = (self.first_needed(group, blocks * block_size, block_size) for group in range(1, len(self.windows)))
        return sum(max(0, blocks - max(held, at)) for at in first)

    def needed(self, tokens: int, block_size: int) -> int:
        """Blocks of all groups that a request with `tokens` tokens needs to go on."""
        end = -(-tokens // block_size)
        return sum(end - self.first_needed(group, tokens, block_size) for group in range(len(self.windows)))


def layer_groups(
    windows: Sequence[int], states: Sequence[bool] = (), state_bytes: int = 0, layer_bytes: int = 0
) -> LayerGroups | None:
    """`windows`: of each layer. None: one group is all there is to have, because no layer or every layer has a
    window, and none has a state. `states`: which layers have one, of `state_bytes` each; the others have `layer_bytes`
    in a block, and at least one of them sees all tokens."""
    if not any(states):
        return _by_window(range(len(windows)), windows)
    others = [layer for layer, has_state in enumerate(states) if not has_state]
    seen = [windows[layer] if windows else 0 for layer in others]
    alone = LayerGroups((0,), tuple((0, place) for place in range(len(others))), len(others))
    found = _by_window(others, seen) or alone
    number = dict(zip(others, found.places, strict=True))
    parts = -(-(len(states) - len(others)) * state_bytes // (found.layers * layer_bytes))
    places, states_so_far = [], 0
    for layer in range(len(states)):
        places.append(number.get(layer, (len(found.windows), states_so_far)))
        states_so_far += layer not in number
    return LayerGroups((*found.windows, *(STATE,) * parts), tuple(places), found.layers, state_bytes)


def _by_window(layers: Sequence[int], windows: Sequence[int]) -> LayerGroups | None:
    """Of layers without states, whose places are in the order of `layers`."""
    kinds = {window: [i for i, one in enumerate(windows) if one == window] for window in sorted(set(windows))}
    if 0 not in kinds or len(kinds) == 1:
        return None
    size = min(len(members) for members in kinds.values())
    places = [(0, 0)] * len(layers)
    groups: list[int] = []
    for window, members in kinds.items():
        for begin in range(0, len(members), size):
            for place, member in enumerate(members[begin : begin + size]):
                places[member] = len(groups), place
            groups.append(window)
    return LayerGroups(tuple(groups), tuple(places), size)


def state_pieces(number: int, state_bytes: int, block_bytes: int) -> list[tuple[int, int, int]]:
    """Where the state of the number-th layer with one lies: (part, offset in its block, bytes) of each piece."""
    begin, end = number * state_bytes, (number + 1) * state_bytes
    pieces = []
    while begin < end:
        part, offset = divmod(begin, block_bytes)
        nbytes = min(block_bytes - offset, end - begin)
        pieces.append((part, offset, nbytes))
        begin += nbytes
    return pieces


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


HELD_STATES = 4
"""Most states that a request holds besides those that a step saves on its way: at its begin the state and the one of
the last border, at its end both again."""


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Which places of a request's table of states have a block, and which of them are saved for other requests.

    A request holds the state after its computed tokens, which its next step needs, and the one at the last block border
    before them, which is saved when the request ends or loses its blocks. A step also leaves states at the borders at
    which prompts save them:

        every `interval` blocks      prompts with a common beginning go on there; interval 0: none
        the end of the prompt        the last border for the same prompt, which computes at least one token

    No step writes to the block of a border that it has passed, so a saved state stays as it is."""

    block_size: int
    interval: int = 0  # in blocks

    def saves(self, prompt_tokens: int, place: int) -> bool:
        """Whether others may go on at the end of this place while the request still runs."""
        end_of_prompt = (prompt_tokens - 1) // self.block_size
        return place + 1 == end_of_prompt or (self.interval > 0 and (place + 1) % self.interval == 0)

    def next_saved(self, prompt_tokens: int, place: int) -> int | None:
        """The first place from `place` on that `saves`; None if there is none."""
        end_of_prompt = (prompt_tokens - 1) // self.block_size - 1
        found = [end_of_prompt] if end_of_prompt >= place else []
        if self.interval:
            found.append((place // self.interval + 1) * self.interval - 1)
        return min(found, default=None)

    def written(self, prompt_tokens: int, start: int, end: int) -> list[int]:
        """The places at which a step over tokens [start, end) leaves a state; the last one gets it after all tokens."""
        last, border = (end - 1) // self.block_size, end // self.block_size - 1
        places = range(start // self.block_size, last + 1)
        return [place for place in places if place in (last, border) or self.saves(prompt_tokens, place)]

    def first_kept(self, tokens: int) -> int:
        """The first place that a request with `tokens` computed tokens keeps."""
        return max(0, tokens // self.block_size - 1)

    def most(self, step_tokens: int) -> int:
        """The most places that a request holds while a step computes `step_tokens` tokens of it."""
        blocks = -(-step_tokens // self.block_size) + 1
        on_the_way = 1 + (blocks // self.interval + 1 if self.interval else 0)
        return HELD_STATES + min(blocks, on_the_way)
