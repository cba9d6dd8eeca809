"""scripts/plan.py long-prompts: bytes by hand, and which way wins where."""

from __future__ import annotations

import orjson
import pytest

from lab.formulas.long_prompts import WAYS, Estimate, estimates
from lab.planning import long_prompts
from lab.simulator.models.step_models import LLAMA3_70B, PAPER_NODE, with_bandwidth


def by_way(tokens: int, nodes: int, gbit_s: float = 696.0) -> dict[str, Estimate]:
    found = estimates(with_bandwidth(PAPER_NODE, gbit_s), LLAMA3_70B, tokens, nodes)
    assert [one.way for one in found] == list(WAYS)
    return {one.way: one for one in found}


def test_bytes_by_hand():
    found = by_way(131_072, 4)
    assert found["tensor"].received_bytes == 4 * 3 / 4 * 131_072 * 8192 * 80 * 2
    assert found["context"].received_bytes == 3 / 4 * 131_072 * 327_680
    assert found["pipeline"].received_bytes == 131_072 * 8192 * 2


@pytest.mark.parametrize("tokens", [8192, 131_072, 1_048_576])
def test_one_node_is_the_same_for_all_but_the_sizes_of_chunks(tokens):
    found = by_way(tokens, 1)
    assert _fields(found["tensor"]) == _fields(found["context"])
    assert found["pipeline"].ttft_s == pytest.approx(found["context"].ttft_s, rel=0.01)
    assert not any(one.received_bytes for one in found.values())


def _fields(one: Estimate) -> dict[str, float]:
    return {name: getattr(one, name) for name in ("nodes", "ttft_s", "received_bytes", "node_s", "wait_s")}


def test_a_slow_network_hurts_the_pipeline_least():
    fast, slow = by_way(131_072, 8), by_way(131_072, 8, gbit_s=25)
    growth = {way: slow[way].ttft_s / fast[way].ttft_s for way in WAYS}
    assert growth["pipeline"] < 1.02 < growth["context"] < growth["tensor"]
    assert slow["pipeline"].ttft_s < slow["context"].ttft_s < slow["tensor"].ttft_s


def test_more_nodes_are_faster_and_a_pipeline_wastes_little_of_their_time():
    for nodes in (2, 4, 8):
        found = by_way(131_072, nodes)["pipeline"]
        assert found.ttft_s < 1.3 * PAPER_NODE.prompt_s(131_072, 0) / nodes
        assert found.node_s < 1.15 * PAPER_NODE.prompt_s(131_072, 0)


def test_the_command_prints_and_writes_every_case(tmp_path, capsys):
    out = tmp_path / "long.json"
    assert long_prompts.main(["--prompts", "8192,131072", "--nodes", "1,8", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "131,072" in printed and "pipeline" in printed
    assert len(orjson.loads(out.read_bytes())["rows"]) == 2 * 2 * 3 * 4
