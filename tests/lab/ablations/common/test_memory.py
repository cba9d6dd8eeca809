"""Nodes have the memory that an ablation states."""

from __future__ import annotations

import pytest

from lab.ablations.rivals import published
from lab.ablations.simulated import ABLATIONS, pool, scheduling
from lab.simulator.cluster import Cluster
from lab.simulator.models.step_models import PAPER_NODE

STATED = {"scheduling": scheduling.BLOCKS, "rivals": published.CACHE_BLOCKS, "pool": pool.BLOCKS}


@pytest.mark.parametrize("name", STATED)
def test_a_node_keeps_the_stated_blocks_and_has_the_models_memory_for_its_requests(name):
    stated = STATED[name]
    assert name == "pool" or f"{stated:,} blocks" in ABLATIONS[name].definition
    for case in ABLATIONS[name].cases(10):
        if name == "pool" and case.label.startswith(pool.GLOBAL):
            continue  # its nodes keep none
        for node in Cluster(case.config).nodes:
            if case.config.prefill_share:
                continue  # its halves divide the memory (tests/lab/simulator/rivals/test_nexus.py)
            if "prefill" in node.roles:
                room = node.arena.room
                assert room.most_kept == stated
                assert room.slots - stated == PAPER_NODE.kv_tokens // case.config.block_tokens
