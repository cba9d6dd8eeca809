"""Step models from recorded steps: the regressions of sched.cost over a whole recording. Pure.

Steps of prompts alone give `prefill`, of decodes alone `decode`, of both `mixed`. The regressions are robust, so that a
hiccup of the machine does not distort the shape. Then each is scaled so that it predicts the total time of its steps,
because hiccups are part of the time that requests take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lab.simulator.models.step_models import StepModel
from lab.simulator.models.steps import RecordedStep
from sched.cost import Regression

Vector = npt.NDArray[np.float64]

MIN_STEPS = 12
"""Minimum steps of a kind to fit its coefficients."""


MIN_SPREAD = 0.2
"""Minimum spread of the shares in which others computed, to fit their effect."""

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Quality:
    """The error of predictions for one kind of steps."""

    steps: int
    error: float  # mean of |predicted - measured| / measured
    bias: float  # total predicted / total measured time, minus 1


def fit(base: StepModel, recorded: Sequence[RecordedStep]) -> StepModel:
    """`base` with the step times of the recording. Raises ValueError if prompts or decodes are missing."""
    prompts = [s for s in recorded if s.chunks and not s.batch]
    decodes = [s for s in recorded if s.batch and not s.chunks]
    both = [s for s in recorded if s.batch and s.chunks]
    w, p, d, e, k = base.decode
    a0, a1, a2 = _coefficients(prompts, base.prefill, "prompts alone")
    d0, d1, k = _coefficients(decodes, (w + d, p + e, k), "decodes alone")
    model = replace(base, prefill=(a0, a1, a2), decode=(0.0, 0.0, d0, d1, k), mixed=None)
    if len(both) < MIN_STEPS:
        return model
    c0, c1, c2, c3, c4 = _coefficients(both, (d0, d1, k, a1, a2), "both")
    return replace(model, mixed=(c0, c1, c2, c3, c4))


def fit_shared(base: StepModel, recorded: Sequence[RecordedStep]) -> tuple[StepModel, float]:
    """(the model of a node that is alone, relative slowdown of a step while another node of the machine computes).
    Alternates: fits the slowdown to the model's errors, then the model to times without the slowdown."""
    shares, seconds = np.array([s.shared for s in recorded]), np.array([s.seconds for s in recorded])
    contention = 0.0
    model = fit(base, recorded)
    if float(np.ptp(shares)) < MIN_SPREAD:
        return model, contention
    for _ in range(ROUNDS):
        miss = np.clip(seconds / np.array([predict(model, s) for s in recorded]), 0.3, 3.0)
        slope, alone = np.polyfit(shares, miss, 1)
        contention = max(0.0, float(slope / alone))
        model = fit(base, [replace(s, seconds=s.seconds / (1 + contention * s.shared)) for s in recorded])
    return model, contention


def quality(model: StepModel, contention: float, recorded: Sequence[RecordedStep]) -> dict[str, Quality]:
    """Quality by kind of step, for the recorded kinds."""
    found = {}
    for name, kind in (("prefill", (True, False)), ("decode", (False, True)), ("mixed", (True, True))):
        own = [s for s in recorded if (bool(s.chunks), bool(s.batch)) == kind]
        if own:
            predicted = np.array([(1 + contention * s.shared) * predict(model, s) for s in own])
            measured = np.array([s.seconds for s in own])
            error = float(np.mean(np.abs(predicted - measured) / measured))
            found[name] = Quality(len(own), error, float(predicted.sum() / measured.sum()) - 1)
    return found


def predict(model: StepModel, step: RecordedStep) -> float:
    """Predicted seconds on a node that is alone."""
    if not step.batch:
        return model.chunks_s(step.chunks)
    if not step.chunks:
        return model.decode_s(step.batch, step.context)
    return model.mixed_s(step.chunks, step.batch, step.context)


def features(step: RecordedStep) -> tuple[float, ...]:
    """The x of t = sum c x, as in step_models.py."""
    new = float(sum(tokens for tokens, _ in step.chunks))
    pairs = float(sum(tokens * (tokens + 2 * context) for tokens, context in step.chunks))
    read = float(step.context + sum(context for _, context in step.chunks))
    if not step.batch:
        return 1.0, new, pairs
    if not step.chunks:
        return 1.0, float(step.batch), read
    return 1.0, float(step.batch), read, new, pairs


def _coefficients(own: Sequence[RecordedStep], prior: Sequence[float], what: str) -> tuple[float, ...]:
    if len(own) < MIN_STEPS:
        raise ValueError(f"{len(own)} recorded steps of {what} are too few to fit a model to: record more requests")
    regression = Regression([max(c, 1e-12) for c in prior], window=len(own))
    for step in own:
        regression.observe(features(step), step.seconds)
    shape: Vector = np.asarray(regression.refit())
    x: Vector = np.array([features(step) for step in own])
    scale = sum(step.seconds for step in own) / float((x @ shape).sum())
    return tuple(float(c) for c in scale * shape)
