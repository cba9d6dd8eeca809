"""A node's knowledge of the time of its own steps: fitted to noisy steps, as real nodes do, or exact.

A real node measures a few steps at its start (--calibration-ms) and learns from every later one (engine/core/costs.py).
Its records carry the fitted coefficients, so placement errs by the noise of the steps and by the form of the model; so
does --batching-policy dynamic. The start measures no step with both prompts and decodes: until the first of them, its
estimate is the sum of both, as on a real node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lab.simulator.models.step_models import Chunk, StepModel
from sched import step_cost
from sched.batching import StepPredictor
from sched.cost import DecodeModel, PrefillModel, prefill_features

KINDS = ("learnt", "exact")

CALIBRATION = (64, 256, 1024)
"""Prompt tokens of the steps at the start; each of them twice, the second time behind a context of the same length."""

BATCHES = ((1, 256), (8, 512), (32, 1024))
"""Requests, and tokens of context of each, of the decode steps at the start."""


class NodeCosts(Protocol):
    """Seconds, as the node expects them."""

    chunks: StepPredictor
    """Of steps with prompts, for the batching policy."""

    @property
    def prefill(self) -> tuple[float, float, float]:
        """The coefficients in the node's records (sched/cost.py)."""

    def prompt_s(self, new: int, context: int) -> float:
        """All chunks of a prompt with `new` tokens after `context` known ones."""

    def decode_s(self, batch: int, context: int) -> float:
        """A decode step; `context` in total."""

    def computed(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step without decodes took so long."""

    def decoded(self, batch: int, context: float, seconds: float) -> None:
        """A decode step took so long."""

    def both(self, chunks: Sequence[Chunk], batch: int, context: int, seconds: float) -> None:
        """A step with chunks and `batch` decodes over `context` tokens in total took so long."""


class ExactChunks:
    """The times of steps with prompts by the step model itself."""

    def __init__(self, model: StepModel) -> None:
        self._model = model

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        return self._model.decode_s(decodes, decode_context)

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return self._model.chunks_s([(tokens, context)])

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        return self._largest(
            lambda chunk: self._model.mixed_s([chunk], decodes, decode_context) <= seconds, prefill_context
        )

    def largest_prefill(self, seconds: float, context: int) -> int:
        return self._largest(lambda chunk: self._model.chunks_s([chunk]) <= seconds, context)

    def _largest(self, fits: Callable[[Chunk], bool], context: int) -> int:
        low, high = 0, self._model.chunk_tokens + 1
        while high - low > 1:
            tokens = (low + high) // 2
            low, high = (tokens, high) if fits((tokens, context)) else (low, tokens)
        return low


class Exact:
    """Knows the step model itself."""

    def __init__(self, model: StepModel) -> None:
        self.prefill = model.prefill
        self.prompt_s, self.decode_s = model.prompt_s, model.decode_s
        self.chunks: StepPredictor = ExactChunks(model)

    def computed(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """There is nothing to learn."""

    def decoded(self, batch: int, context: float, seconds: float) -> None:
        """There is nothing to learn."""

    def both(self, chunks: Sequence[Chunk], batch: int, context: int, seconds: float) -> None:
        """There is nothing to learn."""


class Learnt:
    """The regressions of a real node."""

    def __init__(self, model: StepModel, noise: Callable[[], float]) -> None:
        """noise(): the factor of one measured step."""
        self._chunk_tokens = model.chunk_tokens
        self._prefill, self._decode = PrefillModel(), DecodeModel()
        self._both = step_cost.StepModel(self._prefill, self._decode)
        self.chunks: StepPredictor = self._both
        for tokens in CALIBRATION:
            for context in (0, tokens):
                seconds = model.prefill_s(tokens, context) * noise()
                self._prefill.regression.calibrate(prefill_features(tokens, context), seconds)
        for batch, context in BATCHES:
            seconds = model.decode_s(batch, batch * context) * noise()
            self._decode.regression.calibrate((1.0, batch, batch * context), seconds)

    @property
    def prefill(self) -> tuple[float, float, float]:
        return self._prefill.coefficients

    def prompt_s(self, new: int, context: int) -> float:
        return self._prefill.estimate(new, context, max(1, -(-new // self._chunk_tokens)))

    def decode_s(self, batch: int, context: int) -> float:
        return self._decode.estimate(batch, context)

    def computed(self, chunks: Sequence[Chunk], seconds: float) -> None:
        features = [prefill_features(new, context) for new, context in chunks]
        self._prefill.regression.observe((1.0, sum(f[1] for f in features), sum(f[2] for f in features)), seconds)

    def decoded(self, batch: int, context: float, seconds: float) -> None:
        self._decode.regression.observe((1.0, batch, context), seconds)

    def both(self, chunks: Sequence[Chunk], batch: int, context: int, seconds: float) -> None:
        tokens = sum(new for new, _ in chunks)
        if not tokens:  # nothing was left to compute, such as of a prompt whose parts all came from other nodes
            self.decoded(batch, context, seconds)
            return
        mean_context = round(sum(new * known for new, known in chunks) / tokens)  # as one chunk, like a real node
        self._both.observe(batch, context, tokens, mean_context, seconds)


def costs(kind: str, model: StepModel, noise: Callable[[], float]) -> NodeCosts:
    """Raises ValueError for a kind that is not among KINDS."""
    if kind not in KINDS:
        raise ValueError(f"--step-models must be one of {', '.join(KINDS)}, got {kind!r}")
    return Exact(model) if kind == "exact" else Learnt(model, noise)
