"""The hit-rate tables: replay against a slow cache, the references on the released traces, and the batch flood."""

from dataclasses import replace

import orjson
import pytest

from cache.pool.admission import choose as choose_admission
from cache.pool.policies import choose, policies
from cache.pool.policy import LRU
from lab.caches.belady import Belady
from lab.caches.command import disagreements, main, reference
from lab.caches.replay import replay
from lab.caches.targets import TARGETS, TOLERANCE
from lab.loads.generate import chats, flood
from lab.loads.trace import TraceRow, read_trace
from lab.loads.traces import find_folder

TRACES = find_folder()


def test_replay_is_a_plain_lru_cache():
    """Written out with a list: prefix hits, then blocks used from the last to the first."""
    rows, order, hits = chats(seed=5, requests=150), [], 0
    for row in rows:
        run = 0
        while run < len(row.hash_ids) and row.hash_ids[run] in order:
            run += 1
        hits += run
        for block in reversed(row.hash_ids):
            if block in order:
                order.remove(block)
            order.append(block)
            del order[:-60]
    total = replay(rows, 60, LRU()).total
    assert total.block_hits == hits > 0
    assert total.blocks == sum(len(row.hash_ids) for row in rows)


def test_rates_count_blocks_tokens_and_work():
    rows = [TraceRow(0, 1000, 1, [1, 2]), TraceRow(1, 1024, 1, [1, 3]), TraceRow(2, 512, 1, [1])]
    total = replay(rows, None, LRU()).total
    assert (total.requests, total.blocks, total.block_hits) == (3, 5, 2)
    assert total.token_rate == pytest.approx(1024 / 2536)
    assert 0 < total.work_rate < total.token_rate, "late tokens cost more, and the hits are early"


@pytest.mark.parametrize("name", policies)
def test_no_policy_beats_belady_or_the_ceiling(name):
    rows = chats(seed=2, requests=500)
    ceiling = replay(rows, None, LRU()).total.block_hits
    for capacity in (100, 800):
        outcome = replay(rows, capacity, choose(name))
        assert outcome.inserted - outcome.evicted == capacity
        assert 0 < outcome.total.block_hits <= replay(rows, capacity, Belady(rows)).total.block_hits <= ceiling


def test_room_for_everything_makes_all_policies_equal():
    rows = chats(seed=3, requests=200)
    assert len({replay(rows, 10**6, choose(name)).total.block_hits for name in policies}) == 1


def test_a_refused_block_evicts_nothing():
    rows = chats(seed=4, requests=300)
    outcome = replay(rows, 100, LRU(), choose_admission("second-hit"))
    assert outcome.refused > 0
    assert outcome.inserted - outcome.evicted == 100


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_flood_costs_chats_two_points_at_most_with_shares(seed):
    """Reference: fair QoS, cache isolation. Without shares the same flood costs much more."""
    chat = chats(seed, requests=700)
    both = flood(chat, seed, per_request=1.5)
    capacity = 2500

    def lost(policy):
        alone = replay(chat, capacity, choose("lru")).total.block_rate
        return alone - replay(both, capacity, policy).by_class["interactive"].block_rate

    assert lost(choose("lru", {"interactive": 0.9})) <= 0.02
    assert lost(choose("lru")) > 0.04


def test_a_share_that_nobody_uses_is_lent():
    """Batch work alone has the whole cache, whatever belongs to chats."""
    rows = [replace(row, service_class="batch") for row in chats(seed=6, requests=300)]
    alone = replay(rows, 400, choose("lru")).total
    shared = replay(rows, 400, choose("lru", {"interactive": 0.9})).total
    assert shared == alone


def test_generated_traces_repeat():
    assert chats(7, 50) == chats(7, 50) != chats(8, 50)
    assert flood(chats(7, 50), 1, 1.0) == flood(chats(7, 50), 1, 1.0)


def test_the_command_line(tmp_path, capsys):
    """One policy of a user's own, a trace file of his own, a result file."""
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    (tmp_path / "tiny_trace.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for _ in range(4)))
    (tmp_path / "mine.py").write_text("from cache.pool.policy import LRU\n\nclass Mine(LRU):\n    pass\n")
    mine = f"{tmp_path}/mine.py:Mine"
    flags = ["--traces", str(tmp_path), "--eviction", mine, "--capacities", "1,2", "--json", str(tmp_path / "out.json")]
    assert main(flags) == 0
    rows = orjson.loads((tmp_path / "out.json").read_bytes())["rows"]
    rates = {row["case"]: row["ours"] for row in rows if row["metric"] == "block hit rate"}
    assert rates["tiny | mine.py:Mine | 2"] == 0.75, "a result file keeps no folder of this machine"
    assert "tiny: block hit rate" in capsys.readouterr().out
    assert main(["--traces", str(tmp_path / "none")]) == 2
    assert main(["--eviction", "clock"]) == 2


def test_a_disagreement_is_named():
    from lab.bench.common.results import Row

    good = Row("conversation | lru | 10000", "block hit rate", "share", 0.214, {}, {"reference": 0.212})
    bad = Row("conversation | lru | 10000", "block hit rate", "share", 0.220, {}, {"reference": 0.212})
    assert disagreements([good]) == []
    assert len(disagreements([bad])) == 1


@pytest.mark.skipif(TRACES is None, reason="the released traces are not next to this checkout (shared/traces)")
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("trace", sorted(TARGETS))
def test_the_released_traces_give_the_published_rates(trace, policy):
    rows = list(read_trace(TRACES / f"{trace}_trace.jsonl.xz"))
    rate = replay(rows, 10_000, choose(policy)).total.block_rate
    assert abs(rate - reference(trace, policy, 10_000)) <= TOLERANCE


def test_a_flood_keeps_the_chats_in_their_own_class():
    rows = flood(chats(1, 10), 1, 1.0)
    assert [row.service_class for row in rows] == ["interactive", "batch"] * 10
