"""Digests and membership by the cores of production, and the fast stand-in held against them."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from lab.loads.generators import GENERATORS
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.gossip import Gossip
from lab.simulator.result import figures
from sched.membership.member import presets
from tests.lab.simulator.test_failures import check, ran, rows

DIGEST_S = presets["lan"].digest_period_s


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def made(nodes: int = 6, seed: int = 0) -> tuple[Clock, Gossip]:
    clock = Clock()
    return clock, Gossip(clock, [f"n{i}" for i in range(nodes)], nodes, 0.0, seed)


def known(gossip: Gossip, acceptor: int, blocks: list[int]) -> list[float]:
    gossip.acceptor(acceptor, range(6))  # the present
    return gossip.depths(acceptor, blocks).tolist()


def test_others_learn_of_blocks_in_rounds_of_digests():
    clock, gossip = made()
    clock.wait(5.0)
    for block in (1, 2, 3, 4):
        gossip.tell(clock.now, 0, block, True)
    assert known(gossip, 3, [1, 2, 3, 4]) == [0.0] * 6, "nobody told them yet"
    clock.wait(4 * DIGEST_S)
    assert known(gossip, 3, [1, 2, 3, 4, 5]) == [4.0, *[0.0] * 5]
    gossip.tell(clock.now, 0, 3, False)
    assert known(gossip, 3, [1, 2, 3, 4])[0] == 4.0, "an evicted block is known for a while"
    clock.wait(4 * DIGEST_S)
    assert known(gossip, 3, [1, 2, 3, 4])[0] == 2.0


def test_filters_have_false_positives():
    clock, gossip = made()
    for block in range(3000):
        gossip.tell(0.0, 0, block, True)
    clock.wait(5 * DIGEST_S)
    gossip.acceptor(2, range(6))
    assert all(gossip.depths(2, [block])[0] == 1.0 for block in range(0, 3000, 50))
    wrong = sum(gossip.depths(2, [block])[0] for block in range(10_000, 14_000))
    assert 0 < wrong <= 4000 * 8 / 4095 * 2, "a share of 8 / 4095 at most is expected"


def test_a_crash_is_found_by_probes_and_a_new_process_starts_empty():
    clock, gossip = made()
    gossip.tell(0.0, 4, 7, True)
    clock.wait(5.0)
    assert known(gossip, 1, [7])[4] == 1.0 and gossip.absent(1) == ([], [])
    all_know = gossip.crashed(4)
    assert not all_know() and gossip.absent(1) == ([], [])
    waited = 0.0
    while not all_know():
        clock.wait(0.1)
        waited += 0.1
        assert waited <= presets["lan"].detection_s(6)
    assert waited > 1.0, "it takes failed probes and a suspicion"
    assert gossip.absent(1) == ([4], []) and known(gossip, 1, [7])[4] == 0.0, "its digest is forgotten"
    gossip.returned(4)
    clock.wait(5.0)
    assert gossip.acceptor(4, range(6)) == 4
    assert gossip.absent(1) == gossip.absent(4) == ([], [])
    gossip.tell(clock.now, 4, 8, True)
    clock.wait(4 * DIGEST_S)
    assert [known(gossip, i, [8])[4] for i in range(6)] == [1.0] * 6


def test_a_quick_restart_is_known_as_a_new_process():
    clock, gossip = made()
    clock.wait(5.0)
    all_know = gossip.crashed(4)
    clock.wait(0.2)
    gossip.returned(4)
    assert not all_know()
    clock.wait(presets["lan"].detection_s(6) + 5.0)
    assert all_know() and gossip.absent(0) == ([], [])


def test_the_stand_in_is_close_to_the_cores_of_production():
    """The bounds of the fast pool: hit rates within 0.02, mean TTFT within 10 %."""
    requests = [replace(row, timestamp_ms=4 * row.timestamp_ms) for row in GENERATORS["conversation"](3, 600)]
    base = SimConfig(prefill=4, decode=4, cache_blocks=1000)
    real, fast = (figures(Cluster(replace(base, gossip_model=kind)).played(requests)) for kind in ("real", "fast"))
    assert (real["gossip_model"], fast["gossip_model"], fast["digest_answers"]) == ("real", "fast", None)
    assert 0 < real["digest_answers"]["above"] < 0.1 and 0 < real["digest_answers"]["below"] < 0.5
    assert real["token_hit_rate"] > 0.1
    assert fast["token_hit_rate"] == pytest.approx(real["token_hit_rate"], abs=0.02)
    assert fast["ttft_s"]["mean"] == pytest.approx(real["ttft_s"]["mean"], rel=0.10)


def test_requests_of_a_crashed_node_go_on_when_all_know():
    requests = rows(100)
    config = {"prefill": 3, "decode": 3, "gossip_model": "real", "faults": "crash:prefill-1@1+30,crash:decode-0@2+0.5"}
    cluster = ran(requests, **config)
    check(cluster, requests)
    assert sum(job.retries for job in cluster.jobs) > 0
    again = ran(requests, **config)
    assert orjson.dumps(figures(again)) == orjson.dumps(figures(cluster)), "the same seed, the same bytes"


def test_nodes_have_the_digests_of_their_cell_only():
    cluster = ran(rows(20), prefill=16, decode=16, gossip_model="real", cell_nodes=16)
    assert all(job.finished > 0 for job in cluster.jobs)
    told, cells = cluster.placing.told, cluster.placing._cells
    assert isinstance(told, Gossip) and len(cells) > 1
    for cell in cells:
        own = {told._names[i] for i in cell.indices}
        for i in cell.indices:
            assert set(told._nodes[i].core.digests.holders.nodes) - {None} == own


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="--gossip-model must be one of fast, real, got 'psychic'"):
        Cluster(SimConfig(gossip_model="psychic"))
