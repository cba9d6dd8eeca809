"""scripts/tools.py roofline: the formulas against each other and the papers' numbers, the measurement, the plot."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest

from lab.formulas.roofs import (
    Amortized,
    apart_s,
    chunking_s,
    crossovers,
    decode_share,
    least_bandwidth,
    measure,
    reuse_s,
)
from lab.planning import roofline
from lab.simulator.models.step_models import PRESETS

PAPER = PRESETS["llama3-70b-8xa800"]


def test_least_bandwidth_is_where_both_take_equally_long():
    for prefix in (512, 8192, 100_000):
        edge = least_bandwidth(PAPER, prefix)
        assert reuse_s(replace(PAPER, nic_bytes_s=1.01 * edge, nic_latency_s=0.0), prefix)[1] < PAPER.prompt_s(
            prefix, 0
        )
        assert reuse_s(replace(PAPER, nic_bytes_s=0.99 * edge), prefix)[1] > PAPER.prompt_s(prefix, 0)
    # 320 KiB per token at 0.11 ms a token: 3 GB/s (reference/scheduling.md 9.4)
    assert least_bandwidth(PAPER, 8192) == pytest.approx(2.8e9, rel=0.1)


def test_a_slow_network_favours_mixed_steps():
    for tbt_s in (0.05, 0.3):
        fast, slow = (crossovers(replace(PAPER, nic_bytes_s=rate), 8192, tbt_s, 2000) for rate in (1e12, 1e8))
        assert fast[0] == (1, True) and slow[0] == (1, False)
    for (length, apart), (after, other) in pairwise(crossovers(PRESETS["llama3-8b-h200"], 8192, 0.011, 2000)):
        assert length < after and apart is not other


def test_there_is_no_winner_where_neither_keeps_the_objective():
    assert crossovers(PAPER, 8192, 0.001, 50) == [(1, None)]
    assert all(apart is not None for _, apart in crossovers(PAPER, 8192, 0.1, 50))


@pytest.mark.parametrize("preset", ["llama3-70b-8xa800", "llama3-8b-h200"])
@pytest.mark.parametrize("gbit_s", [1.0, 100.0, 1000.0])
def test_the_paragraph_about_short_answers_says_what_the_node_times_say(preset, gbit_s):
    model = replace(PRESETS[preset], nic_bytes_s=gbit_s * 1e9 / 8)
    found, changes = Amortized.of(model, 8192, 0.1), crossovers(model, 8192, 0.1)
    said = found.about(changes)
    apart_first = apart_s(model, 8192, 1, 0.1) < chunking_s(model, 8192, 1, 0.1)
    assert said.startswith("short answers pay" if apart_first else "short answers do not pay")
    dearer = found.mixed_prompt_s - found.apart_prompt_s + found.handover_s
    assert f"takes {abs(1000 * dearer):.3g} ms {'more' if dearer > 0 else 'less'} than alone" in said
    if until := re.search(r"until ([\d,]+) tokens", said):
        last = int(until[1].replace(",", ""))
        before, after = (apart_s(model, 8192, n, 0.1) < chunking_s(model, 8192, n, 0.1) for n in (last - 1, last))
        assert (before, after) == (apart_first, not apart_first)
    assert Amortized.of(model, 8192, 0.001).about([(1, None)]) == "", "no way keeps this objective"


def test_shares_are_bounded_by_what_they_hold():
    assert decode_share(PAPER, 8192, 0.1) < PAPER.decode_s(1, 8192)
    assert decode_share(PAPER, 8192, 0.001) == chunking_s(PAPER, 8192, 100, 0.001) == float("inf")
    assert chunking_s(PAPER, 8192, 100, 10.0) >= PAPER.prompt_s(8192, 0) * 0.99


def test_this_machine_is_measured():
    found = measure(0.05)
    assert min(found.memory_bytes_s, found.flops, found.loopback_bytes_s) > 1e6


def test_the_command(tmp_path, capsys):
    out, plot = tmp_path / "r.json", tmp_path / "r.svg"
    assert roofline.main(["--nic-gbit-s", "10", "--json", str(out), "--plot", str(plot)]) == 0
    told = capsys.readouterr().out
    assert "prefill and decode separate or mixed" in told and "\nshort answers " in told
    assert len(orjson.loads(out.read_bytes())["rows"]) == 3 * 5 and "<svg" in plot.read_text()
    with pytest.raises(SystemExit):
        roofline.main(["--tbt-s", "0"])
    assert "--tbt-s" in capsys.readouterr().err


def test_a_published_model(tmp_path, capsys):
    out = tmp_path / "r.json"
    assert roofline.main(["--model-geometry", "kimi-k2", "--hardware", "16xh200", "--json", str(out)]) == 0
    assert "Kimi-K2 on 16xh200" in capsys.readouterr().out
    told = orjson.loads(out.read_bytes())["config"]["model"]
    assert told["kv"]["groups"][0]["kind"] == "latent" and told["token_bytes"] == 70_272
    assert roofline.main(["--model-geometry", "kimi-k2", "--hardware", "h200"]) == 2
    assert "do not fit" in " ".join(capsys.readouterr().err.split())
