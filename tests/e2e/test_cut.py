"""A node or a site cut off a real cluster by the network: short forms of scripts/faults.py cut-nodes and cut-sites."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.faults.runner import UNAVAILABLE

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 600
pytestmark = pytest.mark.timeout(LONGEST_S + 60)  # the scenario ends before its test, whose end would leave it alone


def play(name: str, out: Path, *flags: str) -> dict[tuple[str, str], float]:
    """The rows of a scenario by case and metric. In a process of its own: it enters a network namespace for good."""
    command = [sys.executable, str(ROOT / "scripts" / "faults.py"), name, *(flags or ["--quick"]), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return {(row["case"], row["metric"]): row["ours"] for row in json.loads(out.read_text())["rows"]}


def test_a_node_cut_off_costs_no_request(tmp_path: Path):
    rows = {metric: value for (_, metric), value in play("cut-nodes", tmp_path / "cut.json").items()}
    assert rows["streams cut"] > 0, "the node was cut off when nothing ran"
    assert rows["requests"] > rows["streams cut"], "nothing was sent during the cut"


def test_two_sites_cut_off_from_each_other_both_go_on(tmp_path: Path):
    """The scenario itself fails if a side answers nothing during the cut, or if tokens differ."""
    rows = play("cut-sites", tmp_path / "sites.json")
    for side in ("east", "west"):
        case = f"link cut, clients in the {side}"
        assert rows[case, "requests"] > rows[case, "streams cut"] > 0
    there = ("no sites", "sites and KV")
    moved = [rows[mode, "east to west"] + rows[mode, "west to east"] for mode in there]
    assert moved[1] < moved[0], "nodes that know the link hand no KV over it"


@pytest.mark.heavy
def test_kv_of_the_embedded_model_crosses_the_link_within_its_budget(tmp_path: Path):
    """The scenario itself fails if no KV crosses, if more than the budget does, or if a cluster has other tokens."""
    sizes = ("--requests", "40", "--rate", "1", "--documents", "12", "--cut-bodies", "4", "--cut-s", "4")
    rows = play("cut-sites", tmp_path / "sites.json", "--modes", "one site,sites and KV", *sizes)
    assert rows["sites and KV", "KV over the link"] > 0
    assert rows["sites and KV", "most KV in one window"] <= 1
    assert rows["one site", "errors"] == rows["sites and KV", "errors"] == 0
    of_one = rows["one site", "east to west"] + rows["one site", "west to east"]
    assert of_one < 0.1, "nodes of one site use no link"
