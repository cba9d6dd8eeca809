"""Planner: decides which blocks of which request are looked up, awaited, loaded and saved. Pure.

It lives in the scheduler of the engine. Per request it follows three numbers: the blocks that the pool has (from a
lookup, which the caller makes), those that the engine has, and `done`, the leading blocks that need no save, because
they are in the pool or on the way to it.

A block is saved when its last token has been computed and is known; the engine may compute ahead of the tokens that it
knows. When the engine falls back, after a failed load or a preemption, `done` falls back with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cache.block import BlockKey
from cache.keys import extend_keys, salted_root
from cache.results import LeadingRun
from connect.vllm.options import Options
from connect.vllm.work import Load, Save, StepWork

FRESH_S = 2.0
"""A lookup that is older is made again: the request may have waited long for a place in the batch."""
POLL_S, POLL_SHARE = 0.005, 0.02
"""From lookup to lookup for a request that waits for its producer: so long, or this share of its wait until then."""
ATTEMPTS = 2
"""Loads of one request that may fail before it is computed without the pool."""


@dataclass(frozen=True, slots=True)
class Match:
    """`tokens` that the pool has after the engine's own ones; None: not known yet, ask again."""

    tokens: int | None
    background: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A request in a step: `computed` tokens before it, `scheduled` ones in it."""

    request_id: str
    computed: int
    scheduled: int
    block_ids: Sequence[int]


@dataclass(slots=True)
class _Request:
    tokens: Sequence[int]  # all known ones; it grows while the request runs
    root: BlockKey
    prompt_tokens: int
    wait_blocks: int
    wait_until: float
    keys: list[BlockKey] = field(default_factory=list)
    run: LeadingRun | None = None
    run_at: float = 0.0
    asked_at: float | None = None  # a question is open since then
    local_tokens: int = 0
    background: bool = False
    waited_from: float | None = None
    loading: frozenset[int] = frozenset()
    failed: int = 0
    done: int = 0


class Planner:
    """`root`: names all that makes KV bytes interchangeable. `layers_at_once`: blocks that can be loaded layer by
    layer; 0: none. Times in seconds, from any steady clock."""

    def __init__(
        self, root: BlockKey, block_size: int, options: Options, layers_at_once: int, may_background: bool = True
    ) -> None:
        self._root = root
        self._size = block_size
        self._options = options
        self._layers_at_once = layers_at_once
        self._may_background = may_background
        self._requests: dict[str, _Request] = {}
        self._running: set[str] = set()
        self._loads: list[Load] = []
        self._failures = 0
        self.counts: Counter[str] = Counter()

    def arrived(
        self, now: float, request_id: str, tokens: Sequence[int], salt: str = "", wait_blocks: int | None = 0
    ) -> None:
        """`tokens` may grow later. `wait_blocks`: blocks that a producer is saving for it; None: all of the prompt."""
        usable = max(0, len(tokens) - 1) // self._size
        wait = usable if wait_blocks is None else min(wait_blocks, usable)
        root = salted_root(self._root, salt)
        self._requests[request_id] = _Request(tokens, root, len(tokens), wait, now + self._options.wait_s)

    def question(self, now: float, request_id: str) -> Sequence[BlockKey]:
        """The keys to look up now for this request; none if nothing is to be asked. `answered` must follow."""
        one = self._requests.get(request_id)
        if one is None or one.asked_at is not None or one.failed >= ATTEMPTS or not self._usable(one):
            return ()
        if one.run is not None and now < one.run_at + self._fresh_s(now, one):
            return ()
        one.asked_at = now
        self.counts["lookups"] += 1
        return self._keys(one)[: self._usable(one)]

    def _fresh_s(self, now: float, one: _Request) -> float:
        if not self._waits(now, one):
            return FRESH_S
        return POLL_S if one.waited_from is None else max(POLL_S, POLL_SHARE * (now - one.waited_from))

    def answered(self, request_id: str, run: LeadingRun | None) -> None:
        """`run` of the keys that `question` gave; None: the pool did not answer."""
        one = self._requests.get(request_id)
        if one is None:
            return
        assert one.asked_at is not None
        one.run, one.run_at, one.asked_at = run or LeadingRun(0), one.asked_at, None
        if run is None:
            self.counts["lookups_failed"] += 1

    def match(self, now: float, request_id: str, local_tokens: int) -> Match:
        """What can be loaded for a request of which the engine has the first `local_tokens`, a multiple of a block."""
        one = self._requests.get(request_id)
        if one is None:
            return Match(0)
        one.local_tokens, one.background, one.loading = local_tokens, False, frozenset()
        one.done = local_tokens // self._size
        usable = self._usable(one)
        if not usable or one.failed >= ATTEMPTS:
            return Match(0)
        if one.run is None or (one.asked_at is not None and not self._waits(now, one)):
            if one.asked_at is None or now < one.asked_at + self._options.lookup_s:
                return Match(None)
            self.counts["lookups_late"] += 1
            return Match(0)
        if self._waits(now, one):
            if one.waited_from is None:
                one.waited_from = now
            return Match(None)
        if one.waited_from is not None:
            self._end_wait(now, one)
        one.done = one.run.blocks
        tokens = min(one.run.blocks, usable) * self._size - local_tokens
        if tokens <= 0:
            return Match(0)
        one.background = self._in_background(request_id, one, tokens // self._size)
        return Match(tokens, one.background)

    def _waits(self, now: float, one: _Request) -> bool:
        """Whether it waits for its producer. Blocks that the engine has of its own need no producer."""
        if one.run is None or now >= one.wait_until:
            return False
        return max(one.run.blocks, one.local_tokens // self._size) < one.wait_blocks

    def _end_wait(self, now: float, one: _Request) -> None:
        assert one.waited_from is not None and one.run is not None
        self.counts["waits"] += 1
        self.counts["wait_us"] += int((now - one.waited_from) * 1e6)
        self.counts["waits_in_vain"] += one.run.blocks < one.wait_blocks
        one.waited_from = None
        one.wait_blocks = 0

    def _in_background(self, request_id: str, one: _Request, blocks: int) -> bool:
        """Between steps if other requests compute, because their next tokens would wait for this load, and if blocks
        come from SSD; otherwise layer by layer, because the first layers are then computed while the last ones are on
        their way."""
        if not self._may_background or self._options.load == "layers":
            return False
        if self._options.load == "background" or blocks > self._layers_at_once:
            return True
        assert one.run is not None
        return one.run.ssd_blocks > 0 or bool(self._running - {request_id})

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """The engine has blocks for the `tokens` that `match` told; they are loaded with the next step."""
        one = self._requests.get(request_id)
        if one is None or tokens <= 0:
            return
        first, count = one.local_tokens // self._size, tokens // self._size
        there = list(block_ids[first : first + count])
        load = Load(request_id, self._keys(one)[first : first + count], there, one.background)
        one.loading = frozenset(there)
        self._loads.append(load)
        self.counts["hit_tokens"] += tokens

    def sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        """Of these tokens, those from DRAM and those from SSD of the pool, as far as the lookup could tell."""
        one = self._requests.get(request_id)
        disk = 0 if one is None or one.run is None else min(tokens, one.run.ssd_blocks * self._size)
        return tokens - disk, disk

    def step(self, rows: Iterable[Row]) -> StepWork:
        """The work of a step."""
        saves: list[Save] = []
        running: set[str] = set()
        for row in rows:
            running.add(row.request_id)
            if (one := self._requests.get(row.request_id)) is not None:
                saves += self._saved(one, row)
        self._running = running
        loads, self._loads = self._loads, []
        return StepWork(loads, saves, self._failures, bool(running))

    def _saved(self, one: _Request, row: Row) -> list[Save]:
        one.done = first = min(one.done, row.computed // self._size)
        known = min(row.computed + row.scheduled, len(one.tokens))
        if self._options.save == "prompt":
            known = min(known, one.prompt_tokens)
        complete = known // self._size
        if self._options.save == "none" or complete <= first:
            return []
        one.done = complete
        keys = self._keys(one)[first:complete]
        self.counts["save_blocks"] += len(keys)
        return [Save(keys, list(row.block_ids[first:complete]), first)]

    def load_failed(self, block_ids: Iterable[int]) -> None:
        """A step reported that these blocks of the engine were not loaded."""
        missing = frozenset(block_ids)
        if not missing:
            return
        self._failures += 1
        for one in self._requests.values():
            if one.loading & missing:
                one.failed += 1
                one.run, one.loading = None, frozenset()

    def saved_blocks(self, request_id: str) -> int:
        """The leading blocks of the request that are in the pool or on the way to it."""
        one = self._requests.get(request_id)
        return 0 if one is None else one.done

    def finished(self, request_id: str) -> None:
        """Forget the request."""
        self._requests.pop(request_id, None)
        self._running.discard(request_id)

    def new_root(self, root: BlockKey) -> None:
        """Later requests use other keys: the KV that the pool has is of no use any more."""
        self._root = root

    @property
    def idle(self) -> bool:
        """Whether the last step computed nothing."""
        return not self._running

    def _usable(self, one: _Request) -> int:
        """Blocks that may come from the pool: the last token is always computed, to have the next one."""
        return max(0, len(one.tokens) - 1) // self._size

    def _keys(self, one: _Request) -> list[BlockKey]:
        """The keys of all full blocks of the known tokens."""
        return extend_keys(one.root, one.keys, one.tokens, self._size)

    def __len__(self) -> int:
        return len(self._requests)
