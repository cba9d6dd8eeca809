"""Measurements of an earlier start are taken only if a few steps agree with them, and are replaced otherwise."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.calibration import earlier as module
from engine.calibration.calibration import SHAPES, Room, expected_s
from engine.calibration.earlier import Earlier, earlier_of, measured
from engine.config.config import Config
from engine.config.machine import Gpu
from engine.core.costs import StepCosts
from net import compiled
from sched.idle_checks import Verdict
from tests.engine.calibration.test_calibration import ROOM, Machine, prefill_s
from tests.engine.calibration.test_recalibration import Node


@pytest.fixture
def kept(tmp_path: Path) -> Earlier:
    return Earlier(tmp_path / "folder" / "steps-1.json")


def start(machine: Machine, kept: Earlier | None) -> StepCosts:
    costs = StepCosts()
    machine.steps.clear()
    measured(machine, costs, ROOM, 5.0, kept, machine.clock)
    return costs


def estimates(costs: StepCosts) -> list[float]:
    return [expected_s(costs, shape) for shape in SHAPES]


def test_a_second_start_runs_two_shapes_and_estimates_as_the_first(kept: Earlier):
    machine = Machine()
    first, many = estimates(start(machine, kept)), len(machine.steps)
    second = start(Machine(), kept)
    assert estimates(second) == pytest.approx(first, rel=1e-9)
    machine = Machine()
    start(machine, kept)
    shapes = {(len(rows[0].token_ids), len(rows)) for rows in machine.steps}
    assert shapes == {(16, 1), (1, 1)} and len(machine.steps) < many / 4


def test_models_go_on_learning_from_what_was_kept(kept: Earlier):
    start(Machine(), kept)
    costs = start(Machine(), kept)
    before = costs.prefill.regression.observations
    costs.prefill.observe(16, 0, 1.0)
    assert before >= len(SHAPES) // 2 and costs.prefill.regression.observations == before + 1


@pytest.mark.parametrize("slow", [4.0, 0.25])
def test_a_machine_that_became_slower_or_faster_is_measured_again(kept: Earlier, slow: float):
    start(Machine(), kept)
    old = kept.path.read_bytes()
    costs = start(Machine(slow), kept)
    truth = estimates(start(Machine(slow), None))
    assert estimates(costs) == pytest.approx(truth, rel=0.1) and kept.path.read_bytes() != old
    again = Machine(slow)
    assert estimates(start(again, kept)) == pytest.approx(truth, rel=0.1) and len(again.steps) < 10


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"prefill": [[1, 16, 256, "x"]], "decode": []}',
             '{"prefill": [[1, -1, 0, 1]], "decode": []}',
             '{"prefill": [[1, 16, NaN, 1]], "decode": []}', '{"prefill": [], "decode": []}',
             '{"prefill": [[1, 16, 1]], "decode": [[1, 1, 64, 1]]}']
)  # fmt: skip
def test_a_damaged_file_is_no_measurement(kept: Earlier, text: str):
    kept.path.parent.mkdir()
    kept.path.write_text(text)
    machine = Machine()
    start(machine, kept)
    assert len(machine.steps) > len(SHAPES)
    assert json.loads(kept.path.read_text())["prefill"], "the next start has these"


def test_a_node_without_room_for_a_step_keeps_nothing(kept: Earlier):
    assert measured(Machine(), StepCosts(), Room((), 16, 1, 1, 1), 5.0, kept) == 0
    assert not kept.path.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    machine = Machine()
    assert estimates(start(machine, Earlier(tmp_path / "file" / "steps-1.json"))) == estimates(start(Machine(), None))


def test_the_folder_stays_small(kept: Earlier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEPT", 3)
    kept.path.parent.mkdir()
    for age in range(1, 6):
        path = kept.path.with_name(f"steps-old{age}.json")
        path.write_text("{}")
        os.utime(path, (1e9 - age, 1e9 - age))
    start(Machine(), kept)
    assert sorted(path.name for path in kept.path.parent.iterdir()) == [
        "steps-1.json",
        "steps-old1.json",
        "steps-old2.json",
    ]


@pytest.mark.parametrize(("slow", "verdict"), [(12.0, Verdict.WRONG), (1.0, Verdict.RIGHT)])
async def test_a_correction_of_an_idle_node_is_for_the_next_start_too(kept: Earlier, slow: float, verdict: Verdict):
    node = Node(slow)
    node.checks.on_corrected(kept.write)
    assert await node.checks.check() is verdict
    found = kept.read()
    assert (found is None) == (verdict is Verdict.RIGHT)
    assert found is None or found.prefill.estimate(100) == pytest.approx(prefill_s(100), rel=0.2)
    await node.close()


def test_what_a_step_depends_on_is_in_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = Config()

    def path(config: Config = config, fingerprint: str = "a", backend: str = "cpu", shapes=SHAPES) -> Path:
        found = earlier_of(config, fingerprint, backend, shapes)
        assert found is not None
        return found.path

    same = path()
    assert same.parent == tmp_path / "mooncake" / "calibration"
    assert path(replace(config, node_id="other", port=1, role="decode", weight_memory_bytes=1 << 20)) == same
    others = [
        path(replace(config, num_threads=7)),
        path(replace(config, dtype="float32")),
        path(replace(config, block_size=64)),
        path(replace(config, weight_dtype="wide")),
        path(replace(config, calibration_ms=100)),
        path(fingerprint="b"),
        path(backend="torch"),
        path(shapes=SHAPES[:-1]),  # a small arena has no room for the largest
    ]
    for name in ("one GPU", "another GPU"):  # whose small steps may take as long, and its large ones not
        found = SimpleNamespace(gpu=Gpu(name, total_bytes=1, free_bytes=1, bfloat16=True))
        monkeypatch.setattr(module, "survey", lambda look_for_gpu, found=found: found)
        others.append(path(replace(config, device="cuda")))
        assert path() == same
    monkeypatch.setattr(compiled, "this_cpu", lambda: b"another CPU")
    assert len({same, *others, path()}) == 12
    assert path(replace(config, calibration_cache=str(tmp_path / "mine"))).parent == tmp_path / "mine"


def test_the_flag_measures_at_every_start():
    assert earlier_of(Config(calibration_cache="off"), "a", "cpu", SHAPES) is None
    assert earlier_of(Config(calibration_ms=0), "a", "cpu", SHAPES) is None


def test_a_disk_that_is_full_leaves_no_file_behind(kept: Earlier, monkeypatch):
    costs = start(Machine(), kept)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    before = kept.path.read_bytes()
    kept.write(costs)
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name] and kept.path.read_bytes() == before
