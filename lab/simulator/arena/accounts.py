"""The room of an arena: what each request holds, which named blocks it uses, and what is left for others.

KV of requests is counted in tokens, because the blocks of nodes are much smaller than those of traces; named blocks,
which later prompts may find, are those of the trace. As in cache/pool/block_pool.py, a block that several requests use
takes room once, nobody evicts it meanwhile, and blocks that nobody uses make room for whatever else needs it:

    used  = KV of requests under no name + named blocks in use        at most the arena, except for a request alone
    kept  = named blocks that nobody uses                             at most what `used` leaves, and `most_kept`

A prompt that waits uses the named blocks of its prefix too, and gives them back when running requests need the room
(engine/core/seats.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, repeat

from cache.pool.policy import Facts

ANSWERS = 1 << 62
"""Ids of blocks of answers begin here: a trace has none for them."""


@dataclass(frozen=True, slots=True)
class Room:
    """Of an arena, in tokens. A block of `block_tokens` tokens takes `kept_tokens` while nobody uses it, and what one
    request holds in it counts `block_tokens`: they differ if the model keeps states or windows at borders."""

    tokens: int
    block_tokens: int
    kept_tokens: int
    most_kept: int  # blocks that nobody uses; 0 = blocks get no names

    @property
    def slots(self) -> int:
        """The most named blocks at a time."""
        return self.tokens // self.kept_tokens


class FactsByPosition:
    """The facts of the blocks of every prompt, for eviction. cost_s(tokens, context): of a block."""

    def __init__(self, block_tokens: int, cost_s: Callable[[int, int], float]) -> None:
        self._size, self._cost_s = block_tokens, cost_s
        self._known: list[Facts] = []

    def first(self, blocks: int) -> Sequence[Facts]:
        """Of at least this number of blocks."""
        for position in range(len(self._known), blocks):
            self._known.append(Facts(position, self._cost_s(self._size, self._size * position)))
        return self._known


@dataclass(slots=True)
class Holder:
    """A request in the arena. `depth`: leading blocks of its prompt that it has found or named; of these it shares
    `uses`, because a block that had its name from another running request before keeps it."""

    tokens: int = 0  # of KV that it needs; 0: it waits
    own: int = 0  # of them, under no name
    depth: int = 0
    uses: list[int] = field(default_factory=list)


class Arena(ABC):
    """One node's KV memory. `blocks`: the named ones."""

    def __init__(self, room: Room, facts: FactsByPosition) -> None:
        self.room = room
        self.used = 0  # tokens that requests hold
        self.blocks: set[int] = set()
        self._facts = facts
        self._holders: dict[Hashable, Holder] = {}
        self._waiting: dict[Hashable, Holder] = {}  # those of them that give their blocks back first
        self._stripped: set[Hashable] = set()
        self._answers = count(ANSWERS)
        self._changed: Callable[[int, bool], None] = lambda block, here: None

    def watch(self, changed: Callable[[int, bool], None]) -> None:
        """Call `changed(block, here)` for every change of `blocks`, but for those of answers."""
        self._changed = changed

    # --- queries

    @property
    def left(self) -> int:
        """Tokens of room for others, if blocks that nobody uses go."""
        return self.room.tokens - self.used

    @property
    def keeps(self) -> bool:
        """Whether blocks get names."""
        return self.room.most_kept > 0

    def lacks(self, who: Hashable, tokens: int) -> int:
        """Room that `who` would take in addition to hold KV of `tokens` tokens."""
        holder = self._holders.get(who)
        if holder is None:
            return tokens
        return max(0, tokens - len(holder.uses) * self.room.block_tokens) - holder.own

    def run(self, blocks: Sequence[int]) -> int:
        """The number of leading blocks that have names here."""
        here = self.blocks
        if not here:
            return 0
        for found, block in enumerate(blocks):
            if block not in here:
                return found
        return len(blocks)

    # --- requests

    def hold(self, who: Hashable, tokens: int) -> None:
        """From now on `who` holds KV of `tokens` tokens. Whether there is room for it, the caller has asked."""
        self.grow(who, tokens)
        self._waiting.pop(who, None)
        self._make_room()

    def grow(self, who: Hashable, tokens: int) -> None:
        """Like `hold`, for one that runs. `grown` must follow before any other call."""
        holder = self._holders.get(who)
        if holder is None:
            holder = self._holders[who] = Holder()
        holder.tokens = tokens
        self._settle(holder)

    def grown(self) -> None:
        """Evict for those that have grown."""
        self._make_room()

    def adopt(self, who: Hashable, blocks: Sequence[int]) -> None:
        """`who` uses these, the first of its prompt, which are all here."""
        holder = self._holders.get(who)
        if holder is None:
            if not blocks:
                return
            holder = self._holders[who] = self._waiting[who] = Holder()
        if holder.depth >= len(blocks):
            return
        more = blocks[holder.depth :]
        holder.depth = len(blocks)
        self._acquire(more)
        holder.uses.extend(more)
        self._settle(holder)
        self._make_room()

    def find(self, who: Hashable, blocks: Sequence[int], most_tokens: int) -> None:
        """`who` uses what is here of the first `most_tokens` tokens of its prompt."""
        if self.blocks:
            blocks = blocks[: most_tokens // self.room.block_tokens]
            self.adopt(who, blocks[: self.run(blocks)])

    def load(self, who: Hashable, tokens: int) -> None:
        """Keep room for the first `tokens` tokens of a prompt, of which some are on their way here, as far as there is
        room."""
        if self.keeps:
            lacking = max(0, self.lacks(who, tokens))
            self.hold(who, max(0, tokens - max(0, lacking - self.left)))

    def loaded(self, who: Hashable, blocks: Sequence[int]) -> None:
        """They are here: these blocks get their names. From now on `who` waits."""
        holder = self._holders.get(who)
        if holder is None or who in self._waiting:
            return
        self.name(who, blocks[: holder.tokens // self.room.block_tokens])
        self.grow(who, 0)
        self._waiting[who] = holder
        self._make_room()

    def name(self, who: Hashable, blocks: Sequence[int]) -> None:
        """These, the first of the prompt that `who` holds, are whole: later prompts may find them."""
        holder = self._holders.get(who)
        if holder is None or not self.keeps or holder.depth >= len(blocks):
            return
        size, facts = self.room.block_tokens, self._facts.first(len(blocks))
        for position in range(holder.depth, len(blocks)):
            own = max(0, holder.tokens - (len(holder.uses) + 1) * size)
            if self.used + own - holder.own + size > self.room.tokens or self._in_use >= self.room.slots:
                break
            if self._name(blocks[position], facts[position]):
                self.used += own - holder.own
                holder.own = own
                holder.uses.append(blocks[position])
            holder.depth += 1
            self._make_room()

    def name_answer(self, who: Hashable, tokens: int) -> None:
        """The whole blocks behind the prompt that `who` has named, of its first `tokens` tokens: they stay like others,
        but nobody finds them."""
        holder = self._holders.get(who)
        if holder is not None and self.keeps:
            whole = max(0, tokens // self.room.block_tokens - holder.depth)
            self.name(who, [*repeat(0, holder.depth), *islice(self._answers, whole)])

    def drop(self, who: Hashable) -> None:
        """`who` holds nothing any more. Its named blocks stay until others need the room."""
        holder = self._holders.pop(who, None)
        self._stripped.discard(who)
        if holder is not None:
            self._waiting.pop(who, None)
            self.used -= holder.own
            self._release(holder.uses)
            self._make_room()

    def strip(self) -> None:
        """Prompts that wait give back what they use."""
        for who in list(self._waiting):
            self.drop(who)
            self._stripped.add(who)

    def was_stripped(self, who: Hashable) -> bool:
        """Whether `who` has given back its prefix since it came; true once."""
        if who in self._stripped:
            self._stripped.remove(who)
            return True
        return False

    def drop_all(self) -> None:
        """No request is left here."""
        for who in list(self._holders):
            self.drop(who)
        self._stripped.clear()

    def clear(self) -> None:
        """The node lost its memory."""
        self.drop_all()
        for block in list(self.blocks):
            self._forget(block)

    def _settle(self, holder: Holder) -> None:
        """Count what is under no name again."""
        own = max(0, holder.tokens - len(holder.uses) * self.room.block_tokens)
        self.used += own - holder.own
        holder.own = own

    # --- named blocks

    def _changed_to(self, block: int, here: bool) -> None:
        (self.blocks.add if here else self.blocks.discard)(block)
        if block < ANSWERS:
            self._changed(block, here)

    @property
    @abstractmethod
    def evicted(self) -> int:
        """Named blocks that made room for others."""

    @property
    @abstractmethod
    def _in_use(self) -> int:
        """Named blocks that requests use."""

    @abstractmethod
    def _acquire(self, blocks: Sequence[int]) -> None:
        """One more request uses these named blocks; `used` grows by those that nobody used before."""

    @abstractmethod
    def _release(self, blocks: Sequence[int]) -> None:
        """One request less uses them; `used` shrinks by those that nobody uses now."""

    @abstractmethod
    def _name(self, block: int, facts: Facts) -> bool:
        """A request holds the whole block: it gets its name, and is in use. False if another request uses one with that
        name: then nothing has changed."""

    @abstractmethod
    def _forget(self, block: int) -> None:
        """The named block, which nobody uses, is lost."""

    @abstractmethod
    def _make_room(self) -> None:
        """Evict until the blocks that nobody uses fit."""
