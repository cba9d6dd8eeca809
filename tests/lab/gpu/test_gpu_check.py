"""scripts/tools.py gpu-check without a GPU: what passes, what is kept when a section dies, what the floors are."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lab.gpu.checks import Check, exit_code, failed, skipped, table
from lab.gpu.sections import BUDGET_S, run_section

ROOT = Path(__file__).resolve().parents[3]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="scripts/setup --test installs triton")
ON_A_BARE_MACHINE = ("gguf", "orjson", "lmdb", "pydantic", "prometheus_client", "pytest_asyncio", "openai")


def test_shares_and_verdicts():
    rate = Check("s", "rate", "GB/s", 90.0, 100.0, goal=0.85)
    late = Check("s", "time", "ms", 5.0, 4.0, goal=0.85, lower_is_better=True)
    assert (rate.share, rate.verdict) == (0.9, "pass")
    assert (late.share, late.verdict) == (0.8, "SHORT")
    assert Check("s", "info", "us", 3.0).verdict == "" and Check("s", "no goal", "us", 3.0, 6.0).verdict == ""
    for measured, limit in ((0.0, 0.0), (5.0, None), (5.0, 0.0)):  # no token is equal to no token
        assert Check("s", "goal without a share", "tokens", measured, limit, goal=0.98).verdict == "FAILED"
    assert failed("s", "x", "why").verdict == "FAILED" and skipped("s", "x", "why").verdict == "skipped"
    assert exit_code([rate, skipped("s", "x", "why")]) == 0
    assert exit_code([rate, late]) == exit_code([rate, failed("s", "x", "why")]) == exit_code([]) == 1


def test_the_table_has_every_line_and_note():
    text = table(
        [Check("engine", "decode 1 x 1024", "ms", 4.1, 3.5, 0.85, True), failed("kernels", "test_x", "no report")]
    )
    lines = text.splitlines()
    assert lines[1].split() == ["engine", "decode", "1", "x", "1024", "4.1", "3.5", "ms", "85.4%", "85%", "pass"]
    assert lines[2].split() == ["kernels", "test_x", "FAILED"]
    assert lines[3] == "kernels, test_x: no report"


def section(tmp_path: Path, code: str, budget_s: float = 60.0) -> list[Check]:
    """A section whose process runs `code`, with `line` as the text of one good line and `path` as where it belongs."""
    line = json.dumps({"section": "engine", "what": "first", "unit": "ms", "measured": 1.0})
    head = f"line, path = {line!r}, {str(tmp_path / 'engine.jsonl')!r}\n"
    return run_section("engine", [sys.executable, "-c", head + code], tmp_path, budget_s)


def test_a_section_that_crashes_leaves_its_lines(tmp_path):
    code = "open(path, 'w').write(line + '\\n{\"section\": \"eng')\nraise SystemExit('out of memory')"
    first, rest = section(tmp_path, code)
    assert first.what == "first" and first.measured == 1.0
    assert rest.verdict == "FAILED" and "out of memory" in rest.note and "exit code 1" in rest.note


def test_a_section_that_hangs_is_stopped_with_its_children(tmp_path):
    code = (
        "import subprocess, sys, time\nopen(path, 'w').write(line + '\\n')\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(600)"
    )
    first, rest = section(tmp_path, code, budget_s=4.0)
    assert first.what == "first" and "stopped after 4 s" in rest.note
    pid = (tmp_path / "engine.log").read_text().split()[1]
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: str) -> bool:
    stat = Path("/proc", pid, "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_section_that_measures_nothing_failed(tmp_path):
    (only,) = section(tmp_path, "pass")
    assert only.verdict == "FAILED" and "nothing" in only.note


def test_under_ten_minutes_together():
    assert sum(BUDGET_S.values()) - BUDGET_S["ranks"] < 600  # which has little to do on one GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tools.py", "gpu-check"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (2, "")
    assert len(done.stdout.splitlines()) == 1 and "GPU" in done.stdout


def test_an_unknown_section_is_refused():
    command = [sys.executable, ROOT / "scripts" / "tools.py", "gpu-check", "--only", "kernels,engines"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no section engines" in done.stderr


@needs_triton
def test_a_bare_gpu_machine_has_what_the_sections_import():
    names = ["lab.gpu.command", *(f"lab.gpu.{name}" for name in BUDGET_S), "lab.gpu.transformers_peer"]
    lacking = f"import sys\nfor name in {ON_A_BARE_MACHINE!r}: sys.modules[name] = None\n"
    code = lacking + f"for name in {names!r}: __import__(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_sanitizer_runs_tests_that_exist():
    from lab.gpu.kernels import TESTS
    from lab.gpu.sanitizer import MEMCHECK, verdict

    for file, names in MEMCHECK.items():
        tree = ast.parse((TESTS / file).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(names) <= defined, file
    clean = verdict(0, "7 passed in 3s\n========= ERROR SUMMARY: 0 errors\n")
    assert (clean.measured, clean.limit, clean.verdict) == (7, 7, "pass")
    assert verdict(86, "7 passed in 3s\n========= ERROR SUMMARY: 2 errors\n").verdict == "SHORT"
    assert verdict(1, "Device not supported").verdict == "FAILED"


def test_kernels_are_counted_from_pytests_report(tmp_path):
    from lab.gpu.kernels import check_of

    report = tmp_path / "r.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="x"/></testcase>'
        '<testcase name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    check = check_of("test_decode", report)
    assert (check.measured, check.limit, check.verdict, check.note) == (1, 2, "SHORT", "failed: b")
    assert check_of("test_decode", tmp_path / "none.xml").verdict == "FAILED"


@needs_triton
def test_goals_of_attention():
    from lab.bench.attention.cases import LLAMA_8B, SMOLLM2, Case
    from lab.bench.common.results import Row
    from lab.gpu.attention import checks_of

    decode, prefill = Case(LLAMA_8B, 32, 8192, 1), Case(LLAMA_8B, 1, 8192, 8192)
    (rate,) = checks_of(decode, Row("d", "rate", "GB/s", 3400.0, limits={"copy": 4300.0}))
    assert (rate.goal, rate.verdict) == (0.85, "SHORT")
    (rate,) = checks_of(prefill, Row("p", "rate", "TFLOP/s", 500.0, limits={"GEMM": 790.0}))
    assert (rate.goal, rate.verdict) == (0.60, "pass")
    peers = {"sdpa flash": 12.0, "sdpa cudnn": 9.0, "flex": None, "flashinfer": None}
    flash, cudnn = checks_of(prefill, Row("p", "time", "us", 10.0, peers))
    assert flash.verdict == "" and (cudnn.goal, cudnn.verdict) == (1.0, "SHORT")
    assert all(check.goal is None for check in checks_of(Case(SMOLLM2, 1, 1024, 1), Row("s", "time", "us", 9.0, peers)))
    (alone,) = checks_of(decode, Row("d", "time", "us", 9.0, dict.fromkeys(peers)))
    assert alone.verdict == ""


@needs_triton
def test_goals_of_short_queries():
    from lab.bench.attention.cases import LLAMA_8B, Case
    from lab.bench.common.results import Row
    from lab.gpu.attention import checks_of

    verify = Case(LLAMA_8B, 1, 32768, 5)
    assert verify.short and not Case(LLAMA_8B, 1, 32768, 65).short and verify.bytes_moved > 100 << 20
    (rate,) = checks_of(verify, Row("v", "rate", "GB/s", 3300.0, limits={"copy": 4300.0}))
    assert (rate.goal, rate.verdict) == (0.75, "pass")
    (flashinfer,) = checks_of(verify, Row("v", "time", "us", 10.0, {"flashinfer": 9.0}))
    assert (flashinfer.goal, flashinfer.verdict) == (1.0, "SHORT")


@needs_triton
def test_the_fastest_tiles_are_written_back(tmp_path, monkeypatch):
    """Times instead of a GPU: a tile that is a little faster is left, one that is much faster goes into the table."""
    from attention.triton.tiles import SM90, TABLE
    from lab.bench.attention.tuning import Target
    from lab.gpu import tiles

    source = ROOT / "attention" / "triton" / "tiles.py"
    table = tmp_path / "tiles.py"
    table.write_text(source.read_text())
    monkeypatch.setattr(tiles, "TABLE", table)
    monkeypatch.setattr(tiles, "own_capability", lambda: 90)
    monkeypatch.setattr(tiles, "chosen", {})
    own = Target(128, torch.bfloat16, 90)
    assert own.kinds == ("decode", "prefill", "long")
    shipped, other, *_ = tiles.near("prefill", own)
    assert shipped == TABLE[128, 2, SM90].prefill and other != shipped
    check = tiles.compared("prefill", shipped, [shipped, other], {shipped: 1.0, other: 0.99}.__getitem__)
    assert check.verdict == "pass" and "fastest" in check.note
    tiles.write()
    assert table.read_text() == source.read_text()
    check = tiles.compared("prefill", shipped, [shipped, other], {shipped: 1.0, other: 0.5}.__getitem__)
    assert (check.verdict, check.share) == ("SHORT", 0.5)
    tiles.write()
    changed = [line for line in table.read_text().splitlines() if line not in source.read_text().splitlines()]
    assert len(changed) == 1 and changed[0].startswith("    (128, 2, SM90): Tiles(") and changed[0].count("Tile(") == 3
    assert tiles.compared("decode", shipped, [other], lambda tile: 1.0).verdict == "FAILED"


@needs_triton
def test_floors_of_the_engine():
    from engine.checkpoint.weights import shapes
    from lab.gpu.engine import CONFIG, decode_bytes, kv_token_bytes, prefill_operations
    from lab.gpu.engine import shapes as ours

    assert ours(CONFIG) == shapes(CONFIG)
    assert kv_token_bytes(CONFIG) == 131_072
    assert decode_bytes(CONFIG, 1, 1024) / 4.3e12 == pytest.approx(3.52e-3, rel=0.01)
    assert decode_bytes(CONFIG, 64, 8192) / 4.3e12 == pytest.approx(19.5e-3, rel=0.01)
    products = 2 * 8192 * 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 2 * 4096 * 128_256
    assert prefill_operations(CONFIG, 8192) == products + 32 * 4 * 32 * 128 * (8192 * 8193 // 2)
