from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.heat import TOLD, HeatCounter, hottest, pack_list, unpack_list
from sched.intents import Intents
from tests.sched.virtual import VirtualNet

names = st.sampled_from(["a", "b", "c"])
chains = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)


def test_a_burst_of_one_new_prefix_has_one_owner():
    intents, chain = Intents(), [b"k1", b"k2", b"k3"]
    owners = [intents.claim(0.001 * i, chain, f"n{i}", ttl_s=1.0) for i in range(50)]
    assert owners == [["n0"] * 3] * 50
    assert intents.depths(0.1, [*chain, b"other"]) == {"n0": 3}


def test_a_longer_chain_is_claimed_from_where_the_first_ends():
    intents = Intents()
    intents.claim(0.0, [1, 2], "a", 1.0)
    assert intents.claim(0.1, [1, 2, 3, 4], "b", 1.0) == ["a", "a", "b", "b"]
    assert intents.depths(0.2, [1, 2, 3, 4, 5]) == {"a": 2, "b": 4}


def test_a_claim_ends_by_time_release_or_death():
    intents = Intents()
    intents.claim(0.0, [1, 2, 3], "a", 1.0)
    intents.release([1], "b")
    assert intents.holder(0.5, 1) == "a", "only the holder can give it back"
    intents.release([1], "a")
    assert intents.holder(0.5, 1) is None and intents.holder(0.5, 2) == "a"
    intents.drop("a")
    assert len(intents) == 0
    intents.claim(1.0, [1], "a", 1.0)
    assert intents.claim(2.0, [1], "b", 1.0) == ["b"]


def test_a_full_table_grants_without_noting():
    intents = Intents(capacity=2)
    assert intents.claim(0.0, [1, 2, 3], "a", 1.0) == ["a"] * 3
    assert len(intents) == 2 and intents.claim(0.1, [3], "b", 1.0) == ["b"]
    assert intents.claim(5.0, [4, 5], "b", 1.0) == ["b", "b"] and intents.holder(5.0, 5) == "b", "room by expiry"


def test_a_claim_without_time_to_live_is_refused():
    with pytest.raises(ValueError, match="time to live"):
        Intents().claim(0.0, [1], "a", 0.0)


@seed(1)
@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), names, chains, st.sampled_from(["claim", "release", "drop"])), max_size=30))
def test_a_key_has_one_owner_at_a_time_and_only_by_its_claim(operations):
    intents, model, now = Intents(), {}, 0.0
    for wait, name, chain, kind in operations:
        now += wait
        model = {key: claim for key, claim in model.items() if claim[1] > now}
        if kind == "claim":
            owners = intents.claim(now, chain, name, 0.7)
            assert owners == [model.get(key, (name,))[0] for key in chain]
            model |= {key: (name, now + 0.7) for key, owner in zip(chain, owners, strict=True) if owner == name}
        elif kind == "release":
            intents.release(chain, name)
            model = {key: claim for key, claim in model.items() if key not in chain or claim[0] != name}
        else:
            intents.drop(name)
            model = {key: claim for key, claim in model.items() if claim[0] != name}
        assert {key: intents.holder(now, key) for key in range(10)} == {
            key: model[key][0] if key in model else None for key in range(10)
        }


# --- heat


def test_heat_is_hits_per_second_and_decays():
    counter = HeatCounter(window_s=5.0)
    for tick in range(600):  # 10 hits per second for a minute
        counter.hit(tick / 10, [7])
    assert counter.heat(59.9, 7) == pytest.approx(10.0, rel=0.02)
    assert counter.heat(59.9 + 5.0, 7) == pytest.approx(10.0 / np.e, rel=0.02)
    counter.forget(7)
    assert counter.heat(60.0, 7) == 0.0


def test_a_list_is_told_only_for_news():
    counter = HeatCounter()
    counter.hit(0.0, [1, 1, 1, 2])
    first = counter.take_list(0.0)
    assert first["key"].tolist() == [1, 2] and counter.take_list(0.1) is None
    counter.hit(0.2, [2])
    assert counter.take_list(0.2) is not None
    assert counter.take_list(200.0).size == 0, "all cold: an empty list is news once"
    assert counter.take_list(201.0) is None


def test_the_counter_keeps_the_hottest():
    counter = HeatCounter(capacity=100)
    for key in range(150):
        counter.hit(0.0, [key] * (2 if key < 80 else 1))
    counter.hit(0.0, range(1000, 1060))
    told = counter.take_list(0.0)
    assert told.size == TOLD and set(told["key"].tolist()) <= set(range(80))


@seed(2)
@given(st.dictionaries(names, st.dictionaries(st.integers(0, 20), st.integers(1, 100), max_size=9), max_size=3))
def test_the_cells_list_is_the_sum_of_the_nodes(heats):
    lists = {}
    for name, keys in heats.items():
        counter = HeatCounter(window_s=1.0)
        counter.hit(0.0, [key for key, times in keys.items() for _ in range(times)])
        told = counter.take_list(0.0)
        if told is not None:
            lists[name] = unpack_list(pack_list(told))
    expected = {key: sum(keys.get(key, 0) for keys in heats.values()) for keys in heats.values() for key in keys}
    found = hottest(lists, 8)
    assert [(hot.key, round(hot.heat)) for hot in found] == sorted(expected.items(), key=lambda e: (-e[1], e[0]))[:8]
    for hot in found:
        assert hot.holders == tuple(sorted(name for name, keys in heats.items() if hot.key in keys))


def test_hot_prefixes_and_their_holders_are_known_in_the_cell():
    net = VirtualNet(seed=1, loss=0.1)
    nodes = net.cluster(4)

    def serve() -> None:
        for node in nodes[:2]:
            node.core.hot.own.hit(net.now + node.clock_offset, [77] * 8 + [int(node.name[1]) + 1])
        net.at(net.now + 1.0, serve)

    serve()
    net.run(75.0)
    for node in nodes:
        [hot, *_] = node.core.hot.hottest(3)
        assert hot.key == 77 and hot.holders == ("n0", "n1") and hot.heat == pytest.approx(16, rel=0.5)
    net.crash("n0")
    assert net.run_until(net.converged, 10.0) is not None
    assert nodes[3].core.hot.hottest(1)[0].holders == ("n1",)


@seed(3)
@given(st.binary(max_size=100))
def test_any_bytes_are_a_hot_list_or_refused(data):
    try:
        hot = unpack_list(data)
    except ValueError:
        return
    assert pack_list(hot) == data
