"""Depths by digests: never deeper than the node's, and kept answers follow what changes."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.gossip.digest import CuckooDigest, assemble, key64
from sched.gossip.holders import Holders
from sched.placement.match import ANCHORS, Matcher


@seed(1)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=8), st.integers(1, 90), st.integers(0, 1 << 30))
def test_depths_are_those_of_the_nodes_to_a_twelfth_of_the_prompt(depths, length, number):
    rng = random.Random(number)
    keys = [rng.randbytes(16) for _ in range(length)]
    holders = Holders()
    matcher = Matcher(lambda: holders)
    assert matcher.depths(keys, 16, np.arange(len(depths))) is None
    places = np.array([*range(len(depths)), -1])
    digests = []
    for i, depth in enumerate(depths):
        digest = CuckooDigest(epoch=1, expected_keys=200)
        for key in keys[:depth]:
            digest.add(key64(key))
        while digest.take_delta() is not None:
            pass
        holders.admit(f"n{i}")
        holders.load(f"n{i}", *assemble(digest.pages()))
        digests.append(digest)

    def check() -> None:
        found, stride = matcher.depths(keys, 16, places), -(-length // ANCHORS)
        for i, digest in enumerate(digests):
            exact = next((at for at, key in enumerate(keys) if key64(key) not in digest), length)
            told = 0 if found is None else found[i] / 16
            assert told <= exact and exact - told < stride
        assert found is None or (found[-1] == 0 and len(found) == len(digests) + 1)
        turned = matcher.depths(keys, 16, places[::-1].copy())
        assert found is None or turned.tolist() == found.tolist()[::-1], "answers that are kept are of these places"

    check()
    drops = rng.choice(digests)
    for key in keys[length // 2 :]:
        drops.discard(key64(key))
    while (delta := drops.take_delta()) is not None:
        assert holders.apply(f"n{digests.index(drops)}", delta)
    check()
