"""Digests and who holds what: no false negatives, few false positives, deltas equal full copies, kept masks true."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.gossip.digest import (
    FINGERPRINTS,
    LANES,
    CuckooDigest,
    Delta,
    DigestError,
    Page,
    _placed,
    alternate,
    alternates,
    assemble,
    key64,
    locate,
)
from sched.gossip.holders import Holders

keys = st.integers(0, 2**64 - 1)
few = st.integers(0, 40).map(lambda number: number * 0x9E3779B97F4A7C15 % 2**64)  # repeats, so that discards hit
steps = st.lists(st.tuples(st.booleans(), few | keys), max_size=120)


def full_copy(digest: CuckooDigest) -> tuple[int, int, np.ndarray]:
    copy = assemble(Page.unpack(page.pack()) for page in digest.pages())
    assert copy is not None
    return copy


def send(digest: CuckooDigest, holders: Holders, name: str, limit: int = 300) -> None:
    """What the gossip does: deltas while they follow, else the full copy."""
    while (delta := digest.take_delta(limit)) is not None:
        holders.apply(name, Delta.unpack(delta.pack()))
    if holders.state(name) != (digest.epoch, digest.seq):
        holders.load(name, *full_copy(digest))


@seed(1)
@settings(deadline=None)
@given(steps)
def test_a_digest_has_no_false_negatives_and_a_slot_per_key(operations):
    digest, truth = CuckooDigest(epoch=1, expected_keys=4), set()
    for added, key in operations:
        (digest.add if added else digest.discard)(key)
        (truth.add if added else truth.discard)(key)
        assert len(digest) == len(truth) and all(key in digest for key in truth)
    while digest.take_delta():
        pass
    assert np.count_nonzero(full_copy(digest)[2]) == len(truth)


@pytest.mark.parametrize("count", [1, 60, 240, 2000])
def test_keys_of_a_grown_table_lie_in_one_of_their_buckets(count):
    """All at once, as a table that grows places them; those without room are left, and moved in one by one."""
    rng = random.Random(count)
    held = [rng.getrandbits(64) for _ in range(count)] + [7 << 20 | 4096 * n for n in range(count // 8)]
    buckets = 64
    slots, left = _placed(np.array(held, np.uint64), buckets)
    placed = sorted(set(held) - set(left.tolist()))
    taken = slots.reshape(buckets, LANES).tolist()
    for key in placed:
        fingerprint, first, second = locate(key, buckets)
        bucket = first if fingerprint in taken[first] else second
        taken[bucket].remove(fingerprint)
    assert sum(map(sum, taken)) == 0, "a slot for every key, and no other"
    for key in left.tolist():
        _, first, second = locate(key, buckets)
        assert slots.reshape(buckets, LANES)[[first, second]].all(), "both of its buckets are full"
    assert len(left) + np.count_nonzero(slots) == len(held)


def test_alternates_are_the_alternate_of_each():
    for buckets in (2, 64, 1 << 18):
        found = alternates(np.arange(FINGERPRINTS, dtype=np.uint16), buckets)
        assert found.tolist() == [alternate(fingerprint, buckets) for fingerprint in range(FINGERPRINTS)]


@pytest.mark.parametrize("load", [0.5, 0.94])
def test_false_positives_stay_below_eight_in_4095(load):
    rng = random.Random(7)
    digest = CuckooDigest(epoch=1, expected_keys=3800)
    count = int(load * digest.buckets * LANES)
    held = {rng.getrandbits(64) for _ in range(count)}
    for key in held:
        digest.add(key)
    assert digest.buckets == 1024, "the table did not have to grow"
    asked = [rng.getrandbits(64) for _ in range(60_000)]
    rate = sum(key in digest for key in asked if key not in held) / len(asked)
    print(f"load {load}: {rate:.4%} false positives, expected {load * 8 / 4095:.4%}")
    assert rate < 1.25 * load * 8 / 4095


@seed(2)
@settings(deadline=None, max_examples=60)
@given(st.lists(steps, min_size=1, max_size=6), st.integers(1, 20))
def test_deltas_leave_what_a_full_copy_brings(rounds, limit):
    digest = CuckooDigest(epoch=1)
    by_delta = Holders()
    by_delta.admit("x")
    by_delta.load("x", *full_copy(digest))
    truth: set[int] = set()
    for operations in rounds:
        for added, key in operations:
            (digest.add if added else digest.discard)(key)
            (truth.add if added else truth.discard)(key)
            by_delta.mask(key)  # keeps masks, which the deltas must then keep true
        send(digest, by_delta, "x", limit)
        copied = Holders()
        copied.admit("x")
        copied.load("x", *full_copy(digest))
        for _, key in operations:
            assert by_delta.mask(key) == copied.mask(key) == int(key in digest)
        assert all(by_delta.mask(key) for key in truth)


def test_a_delta_that_does_not_follow_is_refused_and_a_grown_table_is_a_new_epoch():
    digest, holders = CuckooDigest(epoch=5, expected_keys=4), Holders()
    holders.admit("x")
    digest.add(1)
    first = digest.take_delta()
    assert first is not None and not holders.apply("x", first), "nothing was loaded yet"
    holders.load("x", *full_copy(digest))
    assert not holders.apply("x", first), "it was applied already, by the full copy"
    for key in range(2, 40):
        digest.add(key << 12 | key)
    grown = digest.take_delta()
    assert digest.epoch > 5 and grown is not None and not holders.apply("x", grown), "a new epoch travels whole"
    send(digest, holders, "x")
    assert holders.state("x") == (digest.epoch, 1) and all(holders.mask(key << 12 | key) for key in range(2, 40))


def test_a_full_copy_waits_for_the_delta():
    digest = CuckooDigest(epoch=1)
    digest.add(3)
    with pytest.raises(RuntimeError, match="take the delta"):
        next(digest.pages())


@seed(3)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_sane_delta_or_page_or_refused(data):
    for kind in (Delta, Page):
        try:
            read = kind.unpack(data)
        except DigestError:
            continue
        assert read.pack()[:16] == data[:16]


# --- many nodes


@seed(4)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(0, 2**32), st.integers(1, 12))
def test_depths_are_what_asking_every_node_gives(size, number, length):
    rng = random.Random(number)
    chain = [rng.getrandbits(64) for _ in range(length)]
    holders, digests = Holders(), {}
    for i in range(size):
        digest = digests[f"n{i}"] = CuckooDigest(epoch=i, expected_keys=rng.choice([4, 60]))
        for key in chain[: rng.randrange(length + 1)] + [rng.getrandbits(64) for _ in range(20)]:
            digest.add(key)
        holders.admit(f"n{i}")
        send(digest, holders, f"n{i}")
    for name in rng.sample(sorted(digests), size // 3):
        holders.forget(name)
        del digests[name]
    late = holders.admit("late")
    assert late == (min(i for i in range(size) if f"n{i}" not in digests) if size // 3 else size)
    depths = holders.best_hits(chain)
    for name, digest in digests.items():
        hits = next((depth for depth, key in enumerate(chain) if key not in digest), length)
        assert depths[holders.index(name)] == hits
    assert depths[late] == 0 and len(depths) == len(holders.nodes)
    levels = list(holders.levels(chain))
    assert [depth for depth, _ in levels] == sorted({depth for depth, _ in levels})
    for depth, mask in levels:
        assert mask == sum(1 << i for i in np.flatnonzero(depths >= depth).tolist())


def test_block_keys_are_routed_by_their_first_eight_bytes():
    block_key = bytes(range(16))
    digest, holders = CuckooDigest(epoch=1), Holders()
    digest.add(key64(block_key))
    holders.admit("x")
    holders.load("x", *full_copy_after(digest))
    assert holders.mask(block_key) == holders.mask(key64(block_key)) == 1
    assert holders.best_hits([block_key, b"\xff" * 16]).tolist() == [1]


def full_copy_after(digest: CuckooDigest) -> tuple[int, int, np.ndarray]:
    while digest.take_delta():
        pass
    return full_copy(digest)
