"""--record-steps: what a line holds, and what lab.simulator.models.steps reads from it."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from engine.config.config import Config
from engine.config.flags import UsageError
from engine.core.step_recorder import StepRecorder, step_recorder
from engine.step.part import Stage
from engine.step.step import ScheduledRow, Step
from lab.simulator.models.steps import read_steps
from tests.engine.core.test_worker import make, request, until


async def test_the_steps_of_a_request(tmp_path):
    path = tmp_path / "steps"
    worker, _ = make()
    worker._recorder = StepRecorder(path)
    worker.add(request("a", prompt=5, max_tokens=4))
    worker.start(lambda emissions: None)
    await until(lambda: not worker.batcher.requests)
    await worker.close()
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["rows"] for line in lines] == [[[5, 0]], [[1, 5]], [[1, 6]], [[1, 7]]]
    assert [line["idle"] for line in lines] == [True, False, False, False]
    assert not any(line["waited"] for line in lines)
    assert all(line["begin"] < line["end"] for line in lines)
    read = read_steps(path)
    assert [(step.chunks, step.batch, step.context) for step in read] == [
        (((5, 0),), 0, 0), ((), 1, 6), ((), 1, 7), ((), 1, 8),
    ]  # fmt: skip
    whole = lines[-1]["end"] - lines[0]["begin"]
    assert sum(step.seconds for step in read) == pytest.approx(whole)


def test_a_step_whose_tokens_pass_some_of_the_layers_is_none_to_fit(tmp_path):
    path, one = tmp_path / "steps", request("a", prompt=5)
    one.part = Stage(0, 4, 4, 1000)
    recorder = StepRecorder(path)
    for layers in (range(4), range(2)):
        recorder.add(Step([ScheduledRow(one, 0, 5, False, layers=layers)]), 0.0, 1.0, idle=False, waited=False)
    recorder.close()
    assert [orjson.loads(line)["waited"] for line in path.read_bytes().splitlines()] == [False, True]


def test_no_file_without_the_flag_and_words_for_a_wrong_one(tmp_path):
    assert step_recorder(Config()) is None
    with pytest.raises(UsageError, match="--record-steps"):
        step_recorder(Config(record_steps=str(Path(tmp_path) / "nowhere" / "steps")))
