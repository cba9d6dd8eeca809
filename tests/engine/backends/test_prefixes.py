"""The index of a worker's prefixes: it finds what the events told, and nothing else."""

from __future__ import annotations

import random
from array import array

from cache.keys import chain, salted_root
from engine.backends.prefixes import Prefixes
from net.kv_events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored

ROOT, SIZE = b"r" * 16, 4


def keys(tokens, root=ROOT):
    return list(chain(root, array("I", tokens), SIZE))


def stored(names, parent, tokens, **more):
    fields = {"lora_id": None, "medium": "GPU", "lora_name": None} | more
    return BlockStored(block_hashes=names, parent_block_hash=parent, token_ids=tokens, block_size=SIZE, **fields)


def index(*events):
    one = Prefixes(ROOT)
    one.apply(Batch(1.0, list(events)))
    return one


def test_a_prompt_is_found_by_its_tokens_whatever_the_worker_calls_its_blocks():
    tokens = list(range(12))
    one = index(stored([b"x", 7], None, tokens[:8]), stored([99], 7, tokens[8:]))
    assert one.matched_tokens(keys(tokens)) == 12
    assert one.matched_tokens(keys([*tokens[:8], 5, 5, 5, 5])) == 8
    assert one.matched_tokens(keys([5, *tokens])) == 0
    one.apply(Batch(2.0, [BlockRemoved([7], "GPU")]))
    assert one.matched_tokens(keys(tokens)) == 4
    one.apply(Batch(3.0, [AllBlocksCleared()]))
    assert one.matched_tokens(keys(tokens)) == 0 == len(one)


def test_blocks_that_are_not_of_our_prompts_are_left_out():
    tokens = list(range(8))
    events = [
        stored([1, 2], 55, tokens),  # of an unknown block
        stored([3, 4], None, tokens, lora_id=1),
        stored([5, 6], None, tokens, medium="CPU"),
        stored([7, 8], None, tokens, group_idx=1),
        stored([9, 10], None, tokens, extra_keys=[["image"], None]),
        stored([11, 12], None, tokens, extra_keys=[None, ["image"]]),
        stored([13], None, tokens),  # too many tokens for one block
    ]
    assert len(index(*events)) == 0
    assert len(index(*events, stored([20, 21], None, tokens))) == 2


def test_a_salt_of_ours_names_the_root():
    tokens, root = list(range(8)), salted_root(ROOT, "a")
    one = index(stored([1, 2], None, tokens, extra_keys=[[root.hex()], None]))
    assert one.matched_tokens(keys(tokens, root)) == 8
    assert one.matched_tokens(keys(tokens)) == 0


def test_a_random_cache_is_followed():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    one, held = Prefixes(ROOT), {}  # hash -> key
    prompts = [[rng.randrange(3) for _ in range(24)] for _ in range(6)]
    for _ in range(400):
        tokens = rng.choice(prompts)
        chained = keys(tokens)
        if rng.random() < 0.5:
            names = [hash(key) for key in chained]
            first = next((i for i, name in enumerate(names) if name not in held), len(names))
            end = min(len(names), first + rng.randrange(1, 4))
            if first < end:
                parent = names[first - 1] if first else None
                one.apply(Batch(1.0, [stored(names[first:end], parent, tokens[first * SIZE : end * SIZE])]))
                held |= dict(zip(names[first:end], chained[first:end], strict=True))
        elif held:
            name = rng.choice(list(held))
            one.apply(Batch(1.0, [BlockRemoved([name], "GPU")]))
            del held[name]
        depth = next((i for i, key in enumerate(chained) if key not in held.values()), len(chained))
        assert one.matched_tokens(chained) == depth * SIZE
        assert len(one) == len(set(held.values()))
