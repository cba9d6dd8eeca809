"""Cells: everybody cuts the cluster alike, records stay inside, summaries get everywhere."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from sched.gossip.cells import SUMMARY, CellPlane, bits_for, cell_of, delegates, summarise
from sched.gossip.record import RECORD, NodeRecord, node_key
from sched.membership.member import presets
from sched.membership.packet import Kind
from tests.sched.virtual import VirtualNet

LOCAL = presets["local"]


@seed(1)
@given(st.sets(st.integers(0, 2**64 - 1), max_size=200), st.integers(3, 50))
def test_no_cell_is_above_the_limit_and_no_cut_is_needless(keys, limit):
    bits = bits_for(np.array(sorted(keys), np.uint64), limit)
    cells = np.array([cell_of(key, bits) for key in keys], int)
    assert bits == 16 or not keys or np.bincount(cells).max() <= limit
    if bits:
        coarser = np.bincount([cell_of(key, bits - 1) for key in keys])
        assert coarser.max() > limit


def test_a_thousand_nodes_make_eight_cells_of_about_128():
    keys = np.array(sorted(node_key(f"node-{i}") for i in range(1024)), np.uint64)
    bits = bits_for(keys, 256)
    sizes = np.bincount([cell_of(int(key), bits) for key in keys])
    print(bits, sizes)
    assert bits in (2, 3) and sizes.max() <= 256 and len(delegates(keys.tolist())) == 3


def test_a_summary_adds_up():
    loads = [
        NodeRecord(version=1, work_s=2.0, prefill_a1=0.001, waiting=3, running=4, max_running=10, blocks_total=100),
        NodeRecord(
            version=5, work_s=1.0, prefill_a1=0.0005, running=12, max_running=10, blocks_used=30, blocks_total=50
        ),
        NodeRecord(),
    ]
    records = np.frombuffer(b"".join(load.pack() for load in loads), RECORD)
    [row] = summarise(5, 3, records)
    assert (row["cell"], row["bits"], row["nodes"], row["waiting"], row["running"]) == (5, 3, 2, 3, 16)
    assert (row["work_min_s"], row["work_mean_s"], row["free_seats"]) == (1.0, 1.5, 6)
    assert row["prefill_tokens_per_s"] == pytest.approx(3000) and (row["blocks_free"], row["blocks_total"]) == (
        120,
        150,
    )
    assert summarise(0, 1, records[2:])["nodes"] == 0


def test_records_stay_in_the_cell_and_summaries_get_everywhere():
    net = VirtualNet(seed=2, preset=replace(LOCAL, cell_nodes=6), loss=0.05)
    nodes = [net.start(f"n{i}") for i in range(24)]
    keys = np.array([node_key(node.name) for node in nodes], np.uint64)
    bits = bits_for(keys, 6)
    cells: dict[int, set[str]] = {}
    for node in nodes:
        cells.setdefault(cell_of(node_key(node.name), bits), set()).add(node.name)
    busy = min(cells)
    for node in nodes:
        work_s = 5.0 if node.name in cells[busy] else 1.0
        node.load = NodeRecord(work_s=work_s, blocks_total=10, prefill_a1=0.001)
    net.acquaint()
    net.run(6.0)
    for node in nodes:
        mine = cells[cell_of(node_key(node.name), bits)]
        assert set(node.core.view.records(net.now + node.clock_offset)) == mine
        rows = node.core.cells.summaries(net.now + node.clock_offset)
        assert rows["cell"].tolist() == sorted(cells)
        assert rows["nodes"].tolist() == [len(cells[cell]) for cell in sorted(cells)]
        assert rows["age_s"].max() < 4.0
        asked = {member.node_id for member in node.core.elsewhere(net.now + node.clock_offset, net.rng)}
        assert bool(asked) == (node.name in cells[busy]) and not asked & mine, "the busy cell asks another, they do not"
    assert any(node.core.digests.holders.index(other) is None for node in nodes for other in net.nodes)


def test_a_cell_that_empties_joins_its_neighbour():
    net = VirtualNet(seed=3, preset=replace(LOCAL, cell_nodes=6))
    nodes = [net.start(f"n{i}") for i in range(10)]
    net.acquaint()
    net.run(1.0)
    for node in nodes[:5]:
        net.leave(node.name)
    assert net.run_until(net.converged, 5.0) is not None
    names = {node.name for node in nodes[5:]}
    assert net.run_until(lambda: all(set(held(net, node)) == names for node in net.up()), 5.0) is not None
    net.run(1.0)
    assert all(node.core.cells.summaries(net.now + node.clock_offset).size == 0 for node in net.up())


def held(net, node) -> dict[str, NodeRecord]:
    return node.core.view.records(net.now + node.clock_offset)


@seed(4)
@given(st.sampled_from([Kind.CELL_AGES, Kind.CELLS]), st.binary(max_size=100), st.integers(0, 4))
def test_any_body_is_taken_or_counted(kind, body, rows):
    plane = CellPlane(0.0, "me", 1, LOCAL, random.Random(1))
    plane.tick(0.0, 2, [], [], np.zeros(0, RECORD))
    body += b"\1" * (rows * SUMMARY.itemsize - len(body)) if rows else b""
    plane.receive(0.0, ("h", 1), kind, 1, body)
    assert (plane.summaries(0.0)["cell"] < 4).all()
