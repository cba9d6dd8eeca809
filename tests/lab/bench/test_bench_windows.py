"""bench.py windows and pool-hits on real nodes: what moves is what later tokens need; a hit loads its prompt."""

from __future__ import annotations

import json

import pytest

from lab.bench import pool_hits, windows


def rows_of(path) -> dict[str, dict]:
    return {row["metric"]: row for row in json.loads(path.read_text())["rows"]}


def test_only_what_is_needed_moves(tmp_path):
    out = tmp_path / "windows.json"
    assert windows.main(["--quick", "--window", "256", "--json", str(out)]) == 0
    moved = rows_of(out)["moved"]
    block_mb = 16 * windows.LAYERS * 2 * windows.KV_HEADS * windows.HEAD_SIZE * windows.BYTES / 1e6
    needed = moved["limits"]["needed"]
    assert needed <= moved["ours"] < needed + 2 * block_mb < moved["peers"]["uniform"]


@pytest.mark.heavy
def test_a_prompt_comes_back_from_the_store(tmp_path):
    out = tmp_path / "hits.json"
    assert pool_hits.main(["--quick", "--json", str(out)]) == 0
    rows, tokens = rows_of(out), 512 - pool_hits.BLOCK
    assert rows["loaded"]["ours"] == pytest.approx(tokens * pool_hits.MODELS["latent"][1] * pool_hits.BYTES / 1e6)
