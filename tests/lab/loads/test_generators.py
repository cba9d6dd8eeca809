"""Generated traces: deterministic by seed, in Mooncake's format, and with the statistics they are made for."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from lab.formulas.loads import pooled
from lab.loads.changes import Alternating, Filled, above, bursty, flipped, merged, one_token, unique, viral
from lab.loads.conversation import conversation
from lab.loads.generate import chats
from lab.loads.generators import GENERATORS, STANDS_FOR
from lab.loads.shapes import goes_viral, mixed, pareto, popular
from lab.loads.synthetic import synthetic
from lab.loads.trace import BLOCK_TOKENS
from sched.classes import CLASSES


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_is_its_seeds_and_writes_the_format(name):
    rows = GENERATORS[name](1, 240)
    assert rows == GENERATORS[name](1, 240) != GENERATORS[name](2, 240)
    assert 230 <= len(rows) <= 240
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(rows)) and rows[0].timestamp_ms >= 0
    for row in rows:
        assert row.input_length > 0 and row.output_length > 0 and row.service_class in CLASSES
        assert len(row.hash_ids) == -(-row.input_length // BLOCK_TOKENS), row
        assert len(set(row.hash_ids)) == len(row.hash_ids)
    assert_prefix_ids(rows)


def assert_prefix_ids(rows):
    """An id stands for its block and everything before it: it always has the same id before it."""
    before = {}
    for row in rows:
        for i, block in enumerate(row.hash_ids):
            parent = row.hash_ids[i - 1] if i else None
            assert before.setdefault(block, parent) == parent


def test_stand_ins_are_known():
    assert set(STANDS_FOR.values()) <= set(GENERATORS)


def hit_rates(rows, blocks):
    tokens = sum(row.input_length for row in rows)
    return [float(pooled(rows, size).sum()) / tokens for size in blocks]


def quantiles(values):
    return np.percentile(values, (50, 90, 99)).tolist()


def test_the_conversation_is_like_the_released_trace():
    rows = conversation(0, 12_031)
    prompts, answers = [row.input_length for row in rows], [row.output_length for row in rows]
    assert np.mean(prompts) == pytest.approx(12_035, rel=0.1) and max(prompts) <= 126_195
    assert quantiles(prompts) == pytest.approx([6_909, 27_367, 85_401], rel=0.2)
    assert np.mean(answers) == pytest.approx(343, rel=0.05)
    assert quantiles(answers) == pytest.approx([350, 597, 1_120], rel=0.12)
    assert len(rows) / rows[-1].timestamp_ms * 1000 == pytest.approx(3.40, rel=0.1)
    assert {row.hash_ids[0] for row in rows} == {0}
    # token hit rates of one LRU cache: 512-token blocks, of 5M, 10M, 50M tokens and without limit (papers.md 9)
    assert hit_rates(rows, (9_766, 19_531, 97_656, 10**6)) == pytest.approx([0.211, 0.291, 0.371, 0.374], abs=0.05)


def test_the_synthetic_load_is_like_the_released_trace():
    rows = synthetic(0, 3_993)
    prompts, answers = [row.input_length for row in rows], [row.output_length for row in rows]
    assert np.mean(prompts) == pytest.approx(15_325, rel=0.1)
    assert quantiles(prompts) == pytest.approx([11_587, 38_615, 66_458], rel=0.25)
    assert np.mean(answers) == pytest.approx(149, rel=0.1)
    assert len(rows) / rows[-1].timestamp_ms * 1000 == pytest.approx(3.91, rel=0.1)
    found = pooled(rows, 10**6)
    assert np.mean(found > 0) == pytest.approx(0.446, abs=0.05)
    assert hit_rates(rows, (1_953, 3_906, 9_766, 19_531, 10**6)) == pytest.approx(
        [0.145, 0.233, 0.428, 0.577, 0.651], abs=0.06
    )


def test_unique_prompts_share_nothing():
    rows = unique(chats(0, 200), 0)
    assert max(Counter(block for row in rows for block in row.hash_ids).values()) == 1
    assert [row.input_length for row in rows] == [row.input_length for row in chats(0, 200)]


def test_a_flip_ends_all_reuse_at_the_middle():
    rows = flipped(chats(0, 400), 0)
    first, second = ({block for row in half for block in row.hash_ids} for half in (rows[:200], rows[200:]))
    assert not first & second


def test_a_viral_prefix_is_in_half_of_what_follows():
    rows = viral(chats(0, 1000), 3)
    head = max(Counter(row.hash_ids[0] for row in rows[500:]).items(), key=lambda pair: pair[1])
    assert head[0] not in {row.hash_ids[0] for row in rows[:500]}
    assert head[1] == pytest.approx(250, abs=50)
    late = goes_viral(3, 2000)
    assert Counter(row.hash_ids[0] for row in late[1000:]).most_common(1)[0][1] == pytest.approx(800, abs=50)
    assert Counter(row.hash_ids[0] for row in late[:1000]).most_common(1)[0][1] == 1


def test_popular_prefixes_have_zipfs_popularity_and_change_at_the_middle():
    rows = popular(0, 40_000)
    first, second = ([row.hash_ids[0] for row in half] for half in (rows[:20_000], rows[20_000:]))
    assert not set(first) & set(second)
    counts = np.array([n for _, n in Counter(first).most_common(50)], dtype=float)
    slope = np.polyfit(np.log(np.arange(1, 51)), np.log(counts), 1)[0]
    assert slope == pytest.approx(-1.1, abs=0.1)


def test_pareto_lengths_have_the_tail():
    rows = pareto(0, 20_000)
    lengths = np.sort(np.array([row.input_length for row in rows], dtype=float))
    assert lengths[0] >= 1024 and lengths[-1] <= 131_072

    share = [float(np.mean(lengths > x)) for x in (2048, 8192)]
    assert math.log(share[0] / share[1]) / math.log(4) == pytest.approx(1.2, abs=0.08)


def test_three_classes_at_once():
    rows = mixed(0, 1200)
    counts = Counter(row.service_class for row in rows)
    assert counts == {"interactive": 600, "standard": 400, "batch": 200}
    batch = [row for row in rows if row.service_class == "batch"]
    assert max(Counter(block for row in batch for block in row.hash_ids).values()) == 1


def dispersion(rows, window_s=10.0):
    """Variance over mean of the counts in windows: 1 for Poisson."""
    times = np.array([row.timestamp_ms for row in rows]) / 1000
    counts = np.histogram(times, np.arange(times[0], times[-1], window_s))[0]
    return float(counts.var() / counts.mean())


def test_bursts_keep_the_rate_and_the_requests():
    plain = synthetic(0, 3_993)  # Poisson
    rows = bursty()(plain, 1)
    assert [row.hash_ids for row in rows] == [row.hash_ids for row in plain]
    assert rows[-1].timestamp_ms == pytest.approx(plain[-1].timestamp_ms, rel=0.2)
    assert dispersion(plain) == pytest.approx(1.0, abs=0.4)
    assert dispersion(rows) > 4.0
    with pytest.raises(ValueError, match="share"):
        bursty(burst=20.0, share=0.1)


def test_batch_fills_with_interactive():
    plain = chats(0, 2000)
    rows = Filled(2.0, 8000.0)(plain, 0)
    batch = [row for row in rows if row.service_class == "batch"]
    seconds = (plain[-1].timestamp_ms - plain[0].timestamp_ms) / 1000
    assert len(batch) / seconds == pytest.approx(2.0, rel=0.15)
    assert np.mean([row.input_length for row in batch]) == pytest.approx(8000, rel=0.15)
    assert {row.service_class for row in rows if row not in batch} == {"interactive"}
    assert not {b for row in batch for b in row.hash_ids} & {b for row in plain for b in row.hash_ids}


def test_phases_by_turns():
    plain = chats(0, 800)
    rows = Alternating(30.0, 1.5, 4.0)(plain, 0)
    for old, new in zip(plain, rows, strict=True):
        if int(old.timestamp_ms / 30_000) % 2:
            assert (new.input_length, new.output_length) == (old.input_length, old.output_length * 4)
        else:
            assert new.input_length == round(1.5 * old.input_length) and new.output_length == old.output_length
        assert len(new.hash_ids) == -(-new.input_length // BLOCK_TOKENS)
    assert_prefix_ids(rows)


def test_merged_traces_share_no_block():
    parts = chats(0, 50), chats(1, 50)
    rows = merged(*parts)
    distinct = [len({b for row in part for b in row.hash_ids}) for part in (*parts, rows)]
    assert len(rows) == 100 and distinct[2] == distinct[0] + distinct[1]
    assert above(rows) == above(parts[0]) + above(parts[1])
    assert all(row.output_length == 1 for row in one_token(rows, 0))
