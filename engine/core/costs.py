"""The cost models of this node's steps, fitted to the measured steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from engine.core.served import Served
from engine.speculation.speculative import VerifyCost
from engine.step.cold import Cold
from engine.step.request import Request
from engine.step.step import ScheduledRow, Step
from sched.cost import DecodeModel, PrefillModel, Regression, prefill_features
from sched.step_cost import StepModel

RESIDUAL_STEPS = 16
"""Number of steps over which the residual is averaged. It shows a slowdown before the models have adapted, because
their window is eight times as long."""


VERIFY_PRIOR = (1.0, 1e-3, 5e-4, 5e-4)
"""Time of a decode step with drafts: a factor of the plain step, plus seconds per step, row and draft token."""


class StepCosts:
    """Feeds measured steps into the prefill and the decode model. The time of a mixed step has two causes, so it
    updates neither model, but the model of how the two add up."""

    def __init__(self) -> None:
        self.prefill = PrefillModel()
        self.decode = DecodeModel()
        self.mixed = StepModel(self.prefill, self.decode)
        self.verify = Regression(VERIFY_PRIOR)
        self.served = Served()
        self._least_s: Callable[[], float] | None = None
        self._log_ratio = 0.0
        self._started, self._step_s, self._prompts_s = 0.0, 0.0, 0.0  # of the running step: begin and estimates

    def take_least(self, least_s: Callable[[], float]) -> None:
        """`least_s()`: the seconds that a pass of the model takes at least, because it reads weights from disk. From
        now on no estimate of a step, or of a chunk of a prompt, is lower."""
        self._least_s = least_s
        self._bound()

    def _bound(self) -> None:
        if self._least_s is not None:
            self.prefill.regression.least = self.decode.regression.least = self._least_s()

    @property
    def residual(self) -> float:
        """Geometric mean of measured / predicted time of the last steps; above 1 the node has become slower."""
        return math.exp(self._log_ratio)

    def replace(self, measured: StepCosts) -> None:
        """The machine is faster or slower than the models say: take those of `measured`, and forget what was learned in
        addition to the old ones."""
        self.prefill.regression, self.decode.regression = measured.prefill.regression, measured.decode.regression
        self.mixed.regression, self.verify, self._log_ratio = None, Regression(VERIFY_PRIOR), 0.0
        self.served.forget_prompts()
        self._bound()

    def _compare(self, predicted: float, seconds: float) -> None:
        if predicted > 0:
            self._log_ratio += (math.log(seconds / predicted) - self._log_ratio) / RESIDUAL_STEPS

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step. In a step with prefill, a draft counts as a decode; other steps with drafts update only
        the cost of drafts. A stage of a long prompt takes its share of the layers; the steps in which a chunk
        passes them count as one, and the last of them teaches nothing if it has decodes. The caller leaves out steps
        that waited for other nodes, or read cold blocks."""
        self._bound()
        if step.has_parts:
            if all(row.ends and not row.decodes for row in step.rows):
                spent_s = sum(row.spent_s for row in step.rows)
                self.prefill.regression.observe(_of_parts(step), spent_s + seconds)
            return
        chunks = [(row.num_tokens, row.start) for row in step.rows if not row.decodes]
        contexts = [row.start + 1 for row in step.rows if row.decodes]
        if not contexts:
            together = _together(chunks)
            self._compare(self.prefill.regression.estimate(together), seconds)
            self.prefill.regression.observe(together, seconds)
        elif not chunks:
            self._compare(self._decodes_s(step.rows), seconds)
            self.verify.observe(self._verified(step.rows), seconds)
            if not _drafts(step.rows):
                self.decode.observe(len(contexts), sum(contexts), seconds)
        else:
            decodes = len(contexts) + sum(_drafts(step.rows))
            self.mixed.observe(decodes, sum(contexts), *_as_one(chunks), seconds)

    def _decodes_s(self, rows: Sequence[ScheduledRow]) -> float:
        """Seconds of the rows that decode, in a step without prompts. With drafts, what such steps took counts: a node
        may never run one without."""
        verified = self._verified(rows)
        return self.verify.estimate(verified) if _drafts(rows) else verified[0]

    def _verified(self, rows: Sequence[ScheduledRow]) -> tuple[float, float, float, float]:
        """The features of `verify`."""
        contexts, drafts = [row.start + 1 for row in rows if row.decodes], _drafts(rows)
        return self.decode.estimate(len(contexts), sum(contexts)), float(bool(drafts)), len(drafts), sum(drafts)

    def started(self, step: Step | None, now: float, drafting_s: float = 0.0) -> None:
        """The engine thread runs this step now; None: it runs none. `drafting_s`: of a draft model before it."""
        all_rows = [] if step is None else step.rows
        rows = [row for row in all_rows if not row.request.apart]
        chunks = [(row.num_tokens, row.start) for row in rows if not row.decodes]
        contexts = [row.start + 1 for row in rows if row.decodes]
        self._started = now
        self._prompts_s = self._step_s = self.prefill.regression.estimate(_together(chunks)) if chunks else 0.0
        if contexts:
            decodes = len(contexts) + sum(_drafts(rows))
            mixed = self.mixed.estimate(decodes, sum(contexts), *_as_one(chunks)) if chunks else None
            self._step_s = drafting_s + (self._decodes_s(rows) if mixed is None else mixed)
        for row in all_rows:
            if row.request.apart:
                part_s = 0.0 if row.decodes else row.share * self.prefill.estimate(row.num_tokens, row.start)
                self._prompts_s += part_s
                self._step_s += part_s if row.request.cold is None else self._slice_s(row, row.request.cold, part_s)

    @staticmethod
    def _slice_s(row: ScheduledRow, cold: Cold, part_s: float) -> float:
        """Seconds of some layers of a request beyond memory: as long as each took in its last step; before that,
        `part_s`, as if everything were hot."""
        layer_s = cold.layer_s.get(row.num_tokens == 1)
        return part_s if layer_s is None or row.layers is None else layer_s * len(row.layers)

    def ran(self, step: Step, begin: float, others_s: Sequence[float]) -> None:
        """A step computed prompts; `others_s`: for each row the part of it that went to other prompts."""
        for row, seconds in zip(step.rows, others_s, strict=True):
            if not row.decodes and not row.request.apart:
                features = prefill_features(row.num_tokens, row.start)
                self.served.computed(row.request.request_id, begin, features, seconds)

    def waited(self, requests: Iterable[Request], seconds: float) -> None:
        """A step computed nothing of these, for the sake of others."""
        for request in requests:
            self.served.lost(request.request_id, seconds)

    def handed_out(self, request_id: str, now: float) -> None:
        """A token of the request leaves this node. Call this after `observe` of its step."""
        self.served.handed_out(request_id, now, self.prefill.regression.estimate)

    def decoded(self, step: Step, begin: float, end: float, tokens: int) -> None:
        """A step yielded `tokens` tokens of its requests that decode. One beyond memory counts if it was alone, and its
        token passed all layers in this step."""
        rows = [row for row in step.rows if row.decodes and row.request.cold is None]
        lone = step.rows[0]
        if not rows and tokens and len(step.rows) == 1 and lone.decodes and lone.share == 1:
            self.served.decoded([lone.request.request_id], end, end - begin, tokens)
        if rows and tokens:
            plain = len(rows) == len(step.rows) and not _drafts(rows)
            context = sum(row.start + 1 for row in rows)
            step_s = end - begin if plain else self.decode.estimate(len(rows), context)
            self.served.decoded([row.request.request_id for row in rows], end, step_s, tokens)

    def verify_cost(self, rows: int, context: int) -> VerifyCost:
        """The cost that drafts add to a step of `rows` decodes over `context` tokens of KV in total."""
        factor, step, row, token = self.verify.coefficients
        return VerifyCost(factor * self.decode.estimate(rows, context), step, row, token)

    def prefill_left(self, request: Request, chunk_tokens: int, known: int = 0) -> float:
        """Seconds from the first step of `request` on this node to its first token; `known` tokens will be there when
        it starts."""
        features = self.left_features(request, chunk_tokens, known)
        return sum(c * x for c, x in zip(self.prompt_coefficients, features, strict=True))

    @property
    def prompt_coefficients(self) -> tuple[float, float, float]:
        """Those of the prefill model, for the time to the first token instead of the time of the steps."""
        return self.served.prefill(self.prefill.coefficients)

    def queued_s(self, prompts: int, left: tuple[float, float, float], now: float) -> float:
        """Seconds until the running step has ended and `prompts` prompts have their first tokens; `left`: the sum of
        their left_features before that step."""
        step_s = max(0.0, self._step_s - (now - self._started))
        behind_s = self.prefill.regression.estimate(left) - self._prompts_s
        return step_s + (self.served.first_tokens_s(max(prompts, left[0]), behind_s) if behind_s > 0 else 0.0)

    def token_s(self, batch: int, context_sum: int) -> float:
        """Seconds between two tokens of a request that decodes with `batch` - 1 others."""
        return self.served.next_token_s(self.decode.estimate(batch, context_sum))

    def left_features(self, request: Request, chunk_tokens: int, known: int = 0) -> tuple[float, float, float]:
        """The same as the features of the prefill model, which add up over requests."""
        done = max(request.num_computed, known)
        left = request.num_tokens - done
        if left <= 1:
            return 0.0, 0.0, 0.0
        chunks, tokens, pairs = prefill_features(left, done, chunks=-(-left // chunk_tokens))
        share = 1.0 if request.part is None else request.part.load
        tokens, pairs = tokens * share, pairs * share
        if (apart := request.apart) is not None and apart.pending:  # its next tokens have passed some layers
            _, less, fewer = prefill_features(apart.pending, done)
            passed = len(range(apart.span.start, apart.layer)) / apart.model_layers
            tokens, pairs = max(0.0, tokens - less * passed), max(0.0, pairs - fewer * passed)
        return chunks, tokens, pairs


def _drafts(rows: Sequence[ScheduledRow]) -> list[int]:
    """The number of draft tokens of each row with some; tokens that are computed again cost as much."""
    return [more for row in rows if (more := row.num_drafts + row.again)]


def _of_parts(step: Step) -> tuple[float, float, float]:
    """The features of a step of parts of long prompts: a stage has less work per token, and the same fixed time."""
    shares = [row.request.share for row in step.rows]
    each = [prefill_features(row.num_tokens, row.start) for row in step.rows]
    tokens, pairs = (sum(s * f[i] for s, f in zip(shares, each, strict=True)) for i in (1, 2))
    return 1.0, tokens, pairs


def _together(chunks: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """The features of a step with these chunks (tokens, context)."""
    features = [prefill_features(tokens, context) for tokens, context in chunks]
    return 1.0, sum(f[1] for f in features), sum(f[2] for f in features)


def _as_one(chunks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(tokens, mean context): several chunks count as one in the model of mixed steps."""
    tokens = sum(count for count, _ in chunks)
    return tokens, round(sum(count * context for count, context in chunks) / tokens)
