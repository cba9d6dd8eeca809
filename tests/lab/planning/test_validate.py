"""scripts/tools.py validate: a real node of a tiny model from calibration to table, and words for what is wrong."""

from __future__ import annotations

import os

import orjson
import pytest

from lab.ablations.live import calibrate
from lab.ablations.live.fetches import LEAST_BYTE_S
from lab.bench.common.client import Outcome
from lab.faults.tiny import tiny_model
from lab.loads.trace import TraceRow, write_trace
from lab.planning import validate
from lab.simulator import command as simulate
from lab.simulator.models.presets import preset
from lab.simulator.models.steps import RecordedStep


def test_a_real_node_and_its_twin(tmp_path, capsys, monkeypatch):
    """Errors are those of a loaded machine: only that they were measured counts here."""
    monkeypatch.setattr(calibrate, "PROMPTS", (16, 100, 400, 1200, 1500, 2000))
    monkeypatch.setattr(calibrate, "TOGETHER", ((4, 60), (3, 300)))
    monkeypatch.setattr(validate, "IDLE_S", 0.2)
    model = tmp_path / "model"
    model.mkdir()
    out, fitted = tmp_path / "out.json", tmp_path / "fitted.json"
    cores = os.sched_getaffinity(0)
    load = ["--rate", "8", "--seconds", "2", "--fit-seconds", "1", "--prompt", "200,0.5", "--answer", "8,0.3"]
    flags = [*tiny_model(model), "--kv-cache-bytes", "16M", "--calibration-ms", "0"]
    code = validate.main([*load, "--json", str(out), "--preset", str(fitted), "--", *flags])
    assert code in (0, 1), capsys.readouterr().err
    assert os.sched_getaffinity(0) == cores
    told = orjson.loads(out.read_bytes())
    rows = {row["metric"]: row for row in told["rows"]}
    assert set(rows) == {name for name, *_ in validate.METRICS}
    assert all(row["live_ms"] > 0 and row["simulated_ms"] > 0 for row in rows.values())
    assert (code == 0) == all(row["met"] for row in rows.values())
    config = told["config"]
    assert config["live"]["requests"] == config["simulated"]["requests"] == config["live"]["finished"]
    assert config["held_out"]["decode"]["steps"] > 5 and config["cores_loaded"]["client"] > 0
    printed = capsys.readouterr().out
    assert "TTFT p99" in printed and "cores: client" in printed
    read = preset(str(fitted))
    assert read.front_s > 0 and read.handover_s == 0 and read.prefill == tuple(config["model"]["prefill"])
    small = ["--generate", "chats", "--requests", "20", "--prefill", "0", "--decode", "0", "--mixed", "2"]
    assert simulate.main([*small, "--model", str(fitted)]) == 0


def test_no_request_of_a_trace_is_measured_and_fitted_to(tmp_path):
    """A model reproduces the data it was fitted to."""
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRow(1000 * i, 600, 80, [2 * i, 2 * i + 1]) for i in range(20)])
    args = validate.parser().parse_args(["--trace", str(path), "--rate", "1"])
    fitted, measured = (validate.rows_of(args, seed, 100.0) for seed in (args.fit_seed, args.seed))
    blocks = [{block for row in part for block in row.hash_ids} for part in (fitted, measured)]
    assert len(fitted) == len(measured) == 10 and not blocks[0] & blocks[1]


def test_answers_of_one_token_validate_no_time_between_tokens(monkeypatch):
    """The refusal is a line; the run before it is not lost to a traceback."""
    figures = {figure: None if figure == "tbt_s" else {"mean": 1.0} for _, figure, *_ in validate.METRICS}
    monkeypatch.setattr(validate, "simulate", lambda *_: (figures, None))
    with pytest.raises(ValueError, match=r"TPOT mean.*--answer"):
        validate.compare(figures, None, None, [])


def test_prefixes_from_both_tiers_of_a_store(tmp_path, capsys, monkeypatch):
    """An arena and a DRAM that hold a few prompts. Errors are those of a loaded machine: only what nodes fetched
    counts. They always fetch; the simulated ones may find that this small model computes sooner."""
    monkeypatch.setattr(calibrate, "PROMPTS", (16, 100, 300, 500, 700, 900))
    monkeypatch.setattr(calibrate, "BEHIND", ((256, 64), (512, 128)))
    monkeypatch.setattr(calibrate, "TOGETHER", ((4, 60), (3, 300)))
    monkeypatch.setattr(validate, "IDLE_S", 0.2)
    model, out = tmp_path / "model", tmp_path / "out.json"
    model.mkdir()
    load = ["--rate", "4", "--seconds", "6", "--fit-seconds", "6", "--prompt", "300,0.5", "--answer", "4,0.3"]
    store = ["--nodes", "prefill=1,decode=1,store=1", "--store-dram-mb", "1", "--store-ssd-mb", "64", "--shared", "0.9"]
    # 768 bytes of KV per token.
    more = [
        "--kv-cache-bytes",
        str(1200 * 768),
        "--max-model-len",
        "1024",
        "--calibration-ms",
        "0",
        "--prefix-fetch",
        "always",
    ]
    flags = [*tiny_model(model), *more, "--prefetch", "wait"]
    for seed in range(1, 6):  # which prompts are in which tier when they come again is luck on a busy machine
        drawn = ["--seed", str(seed), "--fit-seed", str(seed + 100)]
        code = validate.main([*load, *store, *drawn, "--json", str(out), "--", *flags])
        printed = capsys.readouterr()
        assert code in (0, 1), printed.err
        config = orjson.loads(out.read_bytes())["config"]
        live, kept = config["fetches"]["live"], config["fetches"]["store"]
        assert kept["dram_bytes"] <= 1 << 20 and config["simulator"]["store"] == 1
        if live["dram_tokens"] and live["ssd_tokens"]:
            break
    assert live["dram_tokens"] > 0 and live["ssd_tokens"] > 0, printed.out
    assert config["simulator"]["pool_blocks"] > 0 and config["simulator"]["ssd_blocks"] > 0
    assert config["simulated"]["fetched_tokens"] >= config["simulated"]["ssd_tokens"]
    _, byte_s, _ = config["fetches"]["fitted"]["costs"]
    assert config["model"]["nic_bytes_s"] == 1 / max(byte_s, LEAST_BYTE_S), "not the costs of the fitted fetches"
    assert "prefixes from the store: " in printed.out


WRONG = [
    (["--store-dram-mb", "9"], "are for a node with the role store"),
    (["--seed", "2"], "--fit-seed must differ"),
    (["--nodes", "nonsense=1"], "is no role"),
    (["--trace", "no.jsonl"], "no.jsonl"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_flags_are_named(arguments, words, capsys):
    assert validate.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_the_way_in_and_the_hand_over():
    steps = [RecordedStep(at, 0.2, ((100, 0),), 0, 0) for at in (10.05, 10.25, 20.01)]
    steps += [RecordedStep(10.45, 0.03, (), 1, 100)]
    first = Outcome(sent_s=10.0, ttft_s=0.46, itl_s=[0.05, 0.03, 0.03], error=None)
    second = Outcome(sent_s=20.0, ttft_s=0.24, itl_s=[0.07, 0.03, 0.03], error=None)
    assert calibrate.way_in([first, second], steps) == pytest.approx(0.05)
    assert calibrate.hand_over([first, second]) == pytest.approx(0.03)
    assert calibrate.hand_over([Outcome(itl_s=[0.1], error=None)]) == 0.0
    with pytest.raises(ValueError, match="no request of the calibration succeeded: reset"):
        calibrate.way_in([Outcome(error="reset")], steps)
