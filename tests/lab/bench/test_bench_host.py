"""bench_host measures real steps of the batcher, the input builder and the sampler."""

from __future__ import annotations

import json

import pytest

from lab.bench import host


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(host, "VOCAB", 300)
    return host


def test_a_quick_run_writes_every_part_of_every_case(bench, tmp_path):
    path = tmp_path / "host.json"
    assert bench.main(["--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    cases = {f"{mix} rows={n} context=1024" for mix in bench.MIXES for n in (1, 32)}
    metrics = {*bench.PARTS, "all but sample"}
    assert {(row["case"], row["metric"]) for row in rows} == {(c, m) for c in cases for m in metrics}
    assert all(row["ours"] > 0 for row in rows)


def test_the_steps_after_the_first_are_decodes(bench):
    batcher = bench.batch_of(3, 40, 16, bench.SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0))
    builder = bench.InputBuilder(16, bench.torch.device("cpu"))
    logits = bench.torch.randn(3, 300)
    taken = {part: [] for part in bench.PARTS}
    assert bench.one_step(batcher, builder, logits, taken).batch.q_lens == [40, 40, 40]
    inputs = bench.one_step(batcher, builder, logits, taken)
    assert (inputs.batch.q_lens, inputs.batch.kv_lens) == ([1, 1, 1], [41, 41, 41])
    assert [len(values) for values in taken.values()] == [2] * len(bench.PARTS)
