"""scripts/tools.py trace-stats: figures of traces whose reuse is known."""

from __future__ import annotations

import orjson
import pytest

from lab.caches import trace_stats
from lab.loads.generate import chats
from lab.loads.trace import TraceRow, write_trace
from lab.simulator.models.step_models import PRESETS

MODEL = PRESETS["llama3-70b-8xa800"]


def test_prompts_that_come_twice():
    rows = [TraceRow(1000.0 * i, 2048, 10, [4 * (i // 2) + k for k in range(4)]) for i in range(100)]
    stats = trace_stats.statistics(rows, MODEL, 2, 1000)
    assert stats["hit_rate_ceiling"] == pytest.approx(0.5 * 1536 / 2048)
    assert stats["requests_without_hit"] == 0.5 and stats["used_once"] == 0.0
    assert stats["hit_rate_alone"] == 0.0, "twins take turns and never meet"
    assert stats["hit_rate_pool"] == stats["hit_rate_ceiling"]
    assert stats["pool_saves"] > 0.2 and "pool pays" in trace_stats.verdict(stats)


def test_prompts_that_share_nothing():
    rows = [TraceRow(1000.0 * i, 2048, 10, list(range(4 * i, 4 * i + 4))) for i in range(50)]
    stats = trace_stats.statistics(rows, MODEL, 2, 1000)
    assert stats["hit_rate_pool"] == stats["reuses_of_top_1_percent"] == 0.0 and stats["used_once"] == 1.0
    assert "does not pay" in trace_stats.verdict(stats)


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "t.jsonl", tmp_path / "s.json"
    write_trace(path, chats(1, 200))
    assert trace_stats.main(["--trace", str(path), "--json", str(out)]) == 0
    assert "found of a prompt" in capsys.readouterr().out
    assert 0 < orjson.loads(out.read_bytes())["config"]["statistics"]["hit_rate_ceiling"] < 1
    assert trace_stats.main(["--trace", str(path), "--nodes", "0"]) == 2
    assert "--nodes" in capsys.readouterr().err


def test_a_hint_where_there_is_no_trace(monkeypatch, capsys):
    monkeypatch.setattr(trace_stats, "find_trace", lambda name: None)
    assert trace_stats.main([]) == 2
    assert "kvcache-ai/Mooncake" in " ".join(capsys.readouterr().err.split())
