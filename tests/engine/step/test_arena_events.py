"""The set of blocks that a subscriber rebuilds from the events is the set that the arena holds."""

from __future__ import annotations

import random
from array import array

from cache.keys import chain, weights_root
from cache.pool.block_pool import BlockPool, OutOfBlocks
from engine.sampling.params import SamplingParams
from engine.step.arena_events import ArenaEvents, hash_of, runs
from engine.step.block_book import BlockBook
from engine.step.request import Request
from net.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored

ROOT, SIZE = b"r" * 16, 4


class Rebuilt:
    """A subscriber. It checks each hash against the tokens and the parent that its event names."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.keys: dict[int, bytes] = {}  # by hash

    def apply(self, events) -> None:
        for event in events:
            match event:
                case BlockStored():
                    parent = self.keys[event.parent_block_hash] if event.parent_block_hash is not None else ROOT
                    if event.extra_keys is not None:
                        parent = bytes.fromhex(event.extra_keys[0][0])
                        assert event.extra_keys[1:] == [None] * (len(event.block_hashes) - 1)
                    keys = list(chain(parent, array("I", event.token_ids), event.block_size))
                    assert [hash_of(key) for key in keys] == event.block_hashes
                    self.keys |= dict(zip(event.block_hashes, keys, strict=True))
                    self.held |= set(event.block_hashes)
                case BlockRemoved():
                    assert self.held >= set(event.block_hashes)
                    self.held -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.held.clear()


def test_random_requests_in_a_small_arena():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool, rebuilt = BlockPool(24), Rebuilt()
    book = BlockBook(pool, SIZE)
    events = ArenaEvents(SIZE, ROOT, rebuilt.apply)
    book.watch(events.named)
    pool.watch(events.changed)
    running: list[Request] = []
    stems = [[rng.randrange(9) for _ in range(20)] for _ in range(3)]
    for number in range(500):
        if len(running) < 3:
            tokens = rng.choice(stems)[: rng.randrange(1, 20)] + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
            root = ROOT if rng.random() < 0.7 else b"s" * 16
            request = Request(str(number), tokens, len(tokens), SamplingParams(), 0.0, root)
            book.adopt_prefix(request)
            running.append(request)
        request = rng.choice(running)
        step = min(request.num_uncomputed, rng.randrange(1, 7))
        try:
            book.extend(request, step)
        except OutOfBlocks:
            step = request.num_uncomputed
        else:
            request.num_computed += step
            book.name_full(request)
        if request.num_uncomputed == 0 or step == 0 or rng.random() < 0.1:
            book.release(request)
            running.remove(request)
        held = pool.keys()
        assert rebuilt.held == {hash_of(key) for key in held}
    assert pool.num_evictions > 50
    for key in held:
        pool.forget(key)
    assert not rebuilt.held
    rebuilt.held = {1}
    events.cleared()
    assert not rebuilt.held


def test_runs_of_positions():
    assert runs([]) == []
    assert runs([2, 3, 5, 8, 9, 10]) == [(2, 4), (5, 6), (8, 11)]


def test_after_new_weights_only_their_blocks_are_taken_for_those_of_a_prompt():
    """A request on the old weights is told as one with a salt."""
    told, weights = [], b"w" * 16
    events = ArenaEvents(SIZE, ROOT, told.extend)
    new_root = weights_root(ROOT, weights)
    requests = {w: Request("r", [1] * SIZE, SIZE, SamplingParams(), 0.0, ROOT, weights=w) for w in (b"", weights)}
    assert requests[b""].block_keys(SIZE) != requests[weights].block_keys(SIZE)
    events.renewed(new_root)
    for request in requests.values():
        events.named(request, [0])
    assert told[0] == AllBlocksCleared()
    assert [event.extra_keys for event in told[1:]] == [[[ROOT.hex()]], None]
    assert told[2].block_hashes == [hash_of(chain(new_root, array("I", [1] * SIZE), SIZE)[0])]
