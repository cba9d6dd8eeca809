"""The quick grid finds typical mistakes of split attention, and every mutant of the lab still fits its kernel."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.interface import RaggedBatch
from attention.reference import tokens_of
from attention.rotary import RotateThenWrite
from attention.torch_backend import TorchBackend
from lab.bench.attention.grid import find_fault, points
from lab.mutants import command
from lab.mutants.mutant import Mutant
from lab.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
SPLIT = 256  # keys
LONG = [point for point in points(quick=True) if point.dtype == torch.float32 and not point.soft_cap]


class Split(RotateThenWrite):
    """Attention in splits that are merged by their log-sum-exp, with one mistake."""

    name = "split"

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def plan(self, batch: RaggedBatch) -> None:
        return None

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: RaggedBatch, plan: None) -> None:
        TorchBackend().write_kv(k, v, kv, batch, TorchBackend().plan(batch))

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        batch: RaggedBatch,
        plan: None,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0,
    ) -> Tensor:
        out, first = torch.empty_like(q), 0
        for s, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            out[first : first + q_len] = self._one(q[first : first + q_len], kv, batch, s, kv_len, scale, window)
            first += q_len
        return out

    def _one(self, q: Tensor, kv: Tensor, batch: RaggedBatch, s: int, kv_len: int, scale: float, window: int) -> Tensor:
        read = -(-kv_len // 16) * 16 if self.mistake == "stale tail" else kv_len
        group = q.shape[1] // kv.shape[2]
        k, v = (one.repeat_interleave(group, 1) for one in tokens_of(kv, batch.block_tables[s], read, q.dtype))
        unseen = max(0, kv_len - len(q) + 1 - window) if window else 0
        k[:unseen] = v[:unseen] = 0  # their blocks may be those of others
        row = torch.arange(kv_len - len(q), kv_len)[:, None] - int(self.mistake == "mask off by one")
        key = torch.arange(read)
        seen = (key <= row.clamp(min=0)) | (key >= kv_len)
        if window or self.mistake == "keys over 256 back":
            seen &= key > row - (window or 256)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        starts = range(0, read - SPLIT if self.mistake == "missing last split" and read > SPLIT else read, SPLIT)
        parts, tops = [], []
        for start in starts:
            part = scores[:, :, start : start + SPLIT]
            weight = part.logsumexp(-1)
            parts.append(torch.einsum("hqk,khd->hqd", part.softmax(-1).nan_to_num(0.0), v[start : start + SPLIT]))
            tops.append(part.amax(-1) if self.mistake == "merged by maximum" else weight)
        weights = torch.stack(tops).softmax(0)
        if self.mistake == "equal weights":
            weights = (weights > 0).to(weights.dtype) / (weights > 0).sum(0)
        return (torch.stack(parts) * weights[..., None]).sum(0).transpose(0, 1)


def test_splits_without_a_mistake_are_right() -> None:
    for point in LONG:
        assert find_fault(Split(), point) is None, point


@pytest.mark.parametrize(
    "mistake",
    ["stale tail", "mask off by one", "keys over 256 back", "missing last split", "merged by maximum", "equal weights"],
)
def test_the_quick_grid_finds_a_mistake(mistake: str) -> None:
    found = [point for point in LONG if find_fault(Split(mistake), point)]
    assert found, f"no step of the quick grid shows {mistake!r}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_its_kernel(mutant: Mutant) -> None:
    """Otherwise scripts/tools.py mutants would stop there: change lab/mutants/table.py with the kernel."""
    assert mutant.applied(ROOT) != (ROOT / mutant.file).read_text()


@pytest.mark.parametrize(
    ("kernel", "ends"), [("triton", signal.SIGSEGV), ("cpu", signal.SIGABRT), ("triton", signal.SIGKILL)]
)
def test_a_mutant_that_crashes_its_check_is_found(monkeypatch, tmp_path: Path, kernel: str, ends: int) -> None:
    """A read outside of all memory is no hole in the checks. A process that was killed tells nothing."""
    dies = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(ends)})"]
    monkeypatch.setattr(
        command, "_run", lambda *rest: subprocess.run(dies, capture_output=True, text=True, check=False)
    )
    if ends == signal.SIGKILL:
        with pytest.raises(command.Broken):
            command.found_by(None, kernel, tmp_path)
    else:
        assert signal.Signals(ends).name in (command.found_by(None, kernel, tmp_path) or "")


def test_the_quick_grid_runs_on_a_mutant_of_tritons_kernels_in_the_interpreter(monkeypatch, tmp_path: Path) -> None:
    """And the kernel is whole again afterwards."""
    mutant = next(one for one in MUTANTS if one.kernel == "triton")
    file, seen = tmp_path / mutant.file, []
    file.parent.mkdir(parents=True)

    def run(copy: Path, arguments: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        seen.append((arguments, more, file.read_text()))
        return subprocess.CompletedProcess(arguments, 0, '["a step", "is wrong"]', "")

    monkeypatch.setattr(command, "_run", run)
    assert command.step_of(mutant, tmp_path) == "a step: is wrong"
    module = "tests.attention.interpreted.first_fault"
    assert seen == [(["-m", module], {"TRITON_INTERPRET": "1"}, mutant.applied(ROOT))]
    assert file.read_text() == (ROOT / mutant.file).read_text()

    def late(copy: Path, arguments: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        raise command.Broken("not done after 900 s")

    monkeypatch.setattr(command, "_run", late)
    assert command.step_of(mutant, tmp_path) == "it breaks off: not done after 900 s", "the run goes on"
    assert file.read_text() == (ROOT / mutant.file).read_text()
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize(("kernel", "calls"), [("triton", ["pytest", "grid"]), ("cpu", ["grid"])])
def test_every_check_must_pass_on_the_kernels_as_they_are(monkeypatch, tmp_path: Path, kernel: str, calls) -> None:
    """Otherwise a grid that finds fault with right kernels would find every mutant."""
    seen, fault = [], "null"

    def run(copy: Path, arguments: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
        seen.append("pytest" if arguments[1] == "pytest" else "grid")
        return subprocess.CompletedProcess(arguments, 0, fault, "")

    monkeypatch.setattr(command, "_run", run)
    assert command.fault_of_all(kernel, tmp_path) is None and seen == calls
    fault = '["a step", "is wrong"]'
    assert command.fault_of_all(kernel, tmp_path) == "a step: is wrong"
