"""Step models from recordings, and models from files."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulator.models.fit import fit, fit_shared, predict, quality
from lab.simulator.models.presets import preset, write_preset
from lab.simulator.models.step_models import EMBEDDED_CPU, PRESETS, StepModel
from lab.simulator.models.steps import RecordedStep, read_steps, steps, together

KNOWN = replace(
    EMBEDDED_CPU,
    prefill=(4e-3, 3e-4, 2e-8),
    decode=(0.0, 0.0, 1e-2, 1e-3, 2e-7),
    mixed=(1.2e-2, 8e-4, 2e-7, 3.5e-4, 1e-8),
)


def recording(model: StepModel, seed: int, count: int, noise: float) -> list[RecordedStep]:
    """Steps of all three kinds that take what `model` says, but for noise."""
    rng = Random(seed)
    made = []
    for number in range(count):
        chunks = tuple((rng.randint(2, 1000), rng.randint(0, 3000)) for _ in range(rng.randint(1, 3)))
        batch = rng.randint(1, 32)
        kind = number % 3
        one = RecordedStep(
            0.0, 1.0, chunks if kind != 1 else (), batch if kind else 0, batch * rng.randint(10, 900) if kind else 0
        )
        made.append(replace(one, seconds=predict(model, one) * rng.uniform(1 - noise, 1 + noise)))
    return made


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_model_is_found_again(seed):
    fitted = fit(replace(EMBEDDED_CPU, prefill=(1e-2, 1e-3, 1e-9)), recording(KNOWN, seed, 300, 0.05))
    errors = [abs(predict(fitted, one) / one.seconds - 1) for one in recording(KNOWN, seed + 1, 60, 0.0)]
    assert sum(errors) / len(errors) < 0.03 and max(errors) < 0.2  # the noise leaves the shortest steps least certain


def test_hiccups_are_in_the_sum_and_not_in_the_shape():
    slow = [
        replace(s, seconds=s.seconds * (6 if i % 20 < 3 else 1)) for i, s in enumerate(recording(KNOWN, 1, 400, 0.02))
    ]
    found = quality(fit(EMBEDDED_CPU, slow), 0.0, slow)
    assert {name: round(one.bias, 9) for name, one in found.items()} == {"prefill": 0.0, "decode": 0.0, "mixed": 0.0}
    assert sum(one.steps for one in found.values()) == 400


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0])
def test_what_nodes_of_a_machine_take_from_each_other_is_found(factor):
    rng = Random(3)
    shared = [replace(s, shared=rng.choice((0.0, rng.random(), 1.0))) for s in recording(KNOWN, 3, 400, 0.1)]
    slow = [replace(s, seconds=s.seconds * (1 + factor * s.shared)) for s in shared]
    model, contention = fit_shared(EMBEDDED_CPU, slow)
    assert contention == pytest.approx(factor, abs=0.05)
    assert all(one.error < 0.07 for one in quality(model, contention, slow).values())
    assert fit_shared(EMBEDDED_CPU, recording(KNOWN, 3, 400, 0.1))[1] == 0.0  # nobody else was there


def test_shares_of_nodes_that_ran_side_by_side():
    one = [RecordedStep(0.0, 1.0, (), 1, 9), RecordedStep(1.0, 1.0, (), 1, 9), RecordedStep(5.0, 1.0, (), 1, 9)]
    two = [RecordedStep(0.5, 0.75, (), 1, 9)]
    assert [(s.begin, s.shared) for s in together([one, two])] == [(0.0, 0.5), (0.5, 1.0), (1.0, 0.25), (5.0, 0.0)]
    assert [s.shared for s in together([one])] == [0.0] * 3


def test_without_mixed_steps_the_two_are_added_up():
    alone = [s for s in recording(KNOWN, 2, 300, 0.02) if not (s.chunks and s.batch)]
    assert fit(EMBEDDED_CPU, alone).mixed is None
    with pytest.raises(ValueError, match="decodes alone are too few"):
        fit(EMBEDDED_CPU, [s for s in alone if s.chunks])


def test_lines_of_a_recording(tmp_path):
    lines = [
        {"begin": 1.0, "end": 1.2, "idle": True, "waited": False, "rows": [[100, 0]]},
        {"begin": 1.21, "end": 1.3, "idle": False, "waited": True, "rows": [[100, 512]]},
        {"begin": 1.31, "end": 1.4, "idle": False, "waited": False, "rows": [[1, 99], [1, 49], [16, 64]]},
    ]
    first, last = steps(lines)
    assert (first.begin, first.chunks, first.batch, first.context) == (1.0, ((100, 0),), 0, 0)
    assert (last.begin, last.chunks, last.batch, last.context) == (1.3, ((16, 64),), 2, 150)
    assert last.seconds == pytest.approx(0.1)  # from the end of the one before
    path = tmp_path / "steps"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_steps(path) == [first, last]
    path.write_text('{"begin": 1}')
    with pytest.raises(ValueError, match="record-steps"):
        read_steps(path)


def test_a_model_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    write_preset(path, KNOWN, {"commit": "x"})
    assert preset(str(path)) == KNOWN
    assert preset("llama3-8b-h200") is PRESETS["llama3-8b-h200"]


BROKEN = [
    ("nonsense", None, "neither a .json file nor one of"),
    ("x.json", "[]", "is no step model"),
    ("x.json", '{"model": {"speed": 3}}', "speed"),
    ("x.json", '{"model": {"name": "x", "prefill": [1, 2]}}', "prefill must have 3 numbers"),
]


@pytest.mark.parametrize(("name", "text", "words"), BROKEN)
def test_what_is_no_model_is_named(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
        name = str(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        preset(name)
