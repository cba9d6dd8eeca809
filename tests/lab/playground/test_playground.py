"""scripts/playground.py: a right backend passes, a wrong one is named with its first wrong step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from attention.choice.choose import choose
from attention.torch_backend import TorchBackend
from engine.config.flags import UsageError, parse
from lab.bench.attention import side_by_side
from lab.bench.attention.cases import Case, Shape
from lab.bench.attention.grid import Point, find_fault, points
from lab.playground import command as playground

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = Path(playground.__file__).with_name("naive_attention.py")

HEAD = """
import torch
from attention.torch_backend import TorchBackend

"""
BROKEN = {
    "mask": """
class Mine(TorchBackend):
    def attend(self, q, kv, batch, plan, scale, **mask):
        return super().attend(q, kv, batch, plan, 1.01 * scale, **mask)
""",
    "poison": """
class Mine(TorchBackend):
    def attend(self, q, kv, batch, plan, scale, **mask):
        return super().attend(q, kv, batch, plan, scale, **mask) + 0 * kv[0].sum()
""",
    "write": """
class Mine(TorchBackend):
    def write_kv(self, k, v, kv, batch, plan):
        super().write_kv(k, v, kv, batch, plan)
        kv[0, 0, 0, 0] = 0
""",
    "rotation": """
class Mine(TorchBackend):
    def rotate_and_write_kv(self, qkv, num_heads, cos, sin, kv, batch, plan):
        return super().rotate_and_write_kv(qkv, num_heads, cos, -sin, kv, batch, plan)
""",
    "pool": """
class Mine(TorchBackend):
    def attend(self, q, kv, batch, plan, scale, **mask):
        out = super().attend(q, kv, batch, plan, scale, **mask)
        q.zero_()
        return out
""",
    "shape": """
class Mine(TorchBackend):
    def attend(self, q, kv, batch, plan, scale, **mask):
        return super().attend(q, kv, batch, plan, scale, **mask).float()
""",
    "crash": """
class Mine(TorchBackend):
    def attend(self, q, kv, batch, plan, scale, **mask):
        raise IndexError("tile 3")
""",
    "refusal": """
class Mine(TorchBackend):
    def plan(self, batch):
        raise NotImplementedError("decodes")
""",
}
WORDS = {
    "mask": "attend is off by",
    "poison": "reads a slot",
    "write": "touches other slots",
    "rotation": "rotate_and_write_kv gives other",
    "pool": "changes q or the pool",
    "shape": "torch.float32",
    "crash": "IndexError: tile 3",
    "refusal": "NotImplementedError: decodes",
}


@pytest.fixture
def small(monkeypatch):
    """Two steps of the grid and one tiny case to time."""
    few = [point for point in points(quick=True) if point.mix == "everything" and point.dtype.itemsize == 2]
    monkeypatch.setattr(playground, "points", lambda quick: few[:1] + few[-1:])
    monkeypatch.setattr(side_by_side, "small_cases", lambda quick: [Case(Shape("tiny", 4, 2, 32), 2, 20, 1)])


def test_the_example_is_right_timed_and_refuses_what_it_says(small, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert playground.main(["attention", "--backend", str(EXAMPLE), "--quick", "--json", str(path)]) == 0
    assert "naive is right at 1 steps, refuses 1 with a window or soft cap" in capsys.readouterr().out
    row, rate = orjson.loads(path.read_bytes())["rows"]
    assert row["ours"] > 0 and row["peers"]["torch"] > 0
    assert rate["ours"] == pytest.approx(Case(Shape("tiny", 4, 2, 32), 2, 20, 1).bytes_moved / row["ours"] / 1e6)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_kernel_is_caught_and_its_first_wrong_step_named(small, tmp_path, capsys, kind):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + BROKEN[kind])
    assert playground.main(["attention", "--backend", f"{file}:Mine", "--serve"]) == 1  # and is not served
    out = capsys.readouterr().out
    assert WORDS[kind] in out and "everything, 9/3 heads of 64, blocks of 16, bfloat16" in out


def test_a_window_that_is_ignored_is_wrong():
    class Deaf(TorchBackend):
        def attend(self, q, kv, batch, plan, scale, *, window=0, soft_cap=0.0):
            return super().attend(q, kv, batch, plan, scale, soft_cap=soft_cap)

    class Wide(TorchBackend):
        def attend(self, q, kv, batch, plan, scale, *, window=0, soft_cap=0.0):
            kv = kv.nan_to_num()  # blocks of others are zeros, and their keys count
            return super().attend(q, kv, batch, plan, scale, soft_cap=soft_cap)

    plain = next(point for point in points(quick=True) if point.mix == "everything")
    windowed = Point(plain.mix, plain.heads, plain.kv_heads, plain.size, plain.block_size, plain.dtype, window=8)
    assert find_fault(Deaf(), plain) is None
    assert "a slot that holds no token" in (find_fault(Deaf(), windowed) or ""), "a block of others"
    assert "off by" in (find_fault(Wide(), windowed) or "")
    assert find_fault(TorchBackend(), windowed) is None


def test_serving_starts_a_node_with_the_file(small, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, argv: started.append(argv))
    argv = ["attention", "--backend", f"{EXAMPLE}:Naive", "--no-bench", "--serve", "--port", "0"]
    assert playground.main(argv) == 0
    (command,) = started
    assert command[0] == sys.executable
    config = parse(command[2:])
    assert (config.attention_backend, config.port) == (f"{EXAMPLE}:Naive", 0)
    assert choose(config.attention_backend, "cpu").name == "naive"


@pytest.mark.parametrize(
    ("text", "wanted", "words"),
    [
        (None, "", "there is no file"),
        ("x = 1", "", "name the class"),
        ("x = 1", ":Mine", "no class or function 'Mine'"),
        ("class Mine:\n    name = 'mine'", ":Mine", "lacks plan, write_kv"),
        (HEAD + "class A(TorchBackend): pass\nclass B(TorchBackend): pass", "", "suitable classes in the file: A, B"),
        (
            HEAD + "def make():\n    one = TorchBackend()\n    one.name = None\n    return one",
            ":make",
            "lacks a `name`",
        ),
    ],
)
def test_a_file_that_is_no_backend_is_one_clear_line(tmp_path, capsys, text, wanted, words):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    assert playground.main(["attention", "--backend", f"{file}{wanted}"]) == 2
    err = capsys.readouterr().err
    assert words in err and "--backend" in err and "Traceback" not in err


def test_a_factory_and_an_unnamed_class_are_found(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + "class Mine(TorchBackend):\n    name = 'mine'\ndef make():\n    return Mine()\n")
    assert choose(str(file), "cpu").name == choose(f"{file}:make", "cpu").name == "mine"


def test_flags_of_the_node_need_serve(capsys):
    with pytest.raises(SystemExit) as end:
        playground.parse(["attention", "--backend", "mine.py", "--port", "1"])
    assert end.value.code == 2 and "--serve" in capsys.readouterr().err
    with pytest.raises(UsageError, match="must be one of"):
        parse(["--attention-backend", "mine"])


def test_runs_as_a_command():
    command = [sys.executable, str(ROOT / "scripts" / "playground.py"), "attention", "--backend", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 2 and "give a file" in done.stderr
