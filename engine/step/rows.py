"""Converts the batcher's scheduled rows to the runner's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.sampling.logit_rules import SamplingRow
from engine.sampling.logprobs import PromptScores
from engine.step.inputs import Row
from engine.step.request import Request
from engine.step.step import ScheduledRow

if TYPE_CHECKING:
    from torch import Tensor


def row_of(scheduled: ScheduledRow, eos_token_ids: tuple[int, ...], proposals: Sequence[Tensor] = ()) -> Row:
    """The runner's row. It shares the request's lists, which do not change while the runner uses it."""
    request, sample = scheduled.request, None
    if scheduled.samples:
        sample = SamplingRow(request.sampling, request.token_ids, request.num_prompt_tokens, eos_ids=eos_token_ids)
    known = scheduled.num_tokens - len(scheduled.draft)
    token_ids = request.token_ids[scheduled.start : scheduled.start + known] + scheduled.draft
    scores = _scores(request, scheduled.start, known) if request.scores_prompt else None
    drafts, end = len(scheduled.draft), scheduled.start + known
    following = request.token_ids[end] if end < request.num_tokens else 0
    table, others = request.block_table(), request.others
    return Row(token_ids, scheduled.start, table, sample, 1 + drafts, proposals, scores, others, following)


def _scores(request: Request, start: int, count: int) -> PromptScores | None:
    """Where to put the scores of the prompt tokens that follow positions start .. start + count, without those already
    scored: after a preemption the same positions are computed again."""
    top, known = request.sampling.prompt_logprobs, len(request.prompt_logprobs)
    first = max(start, known)
    next_ids = request.token_ids[first + 1 : start + count + 1]
    if top is None or not next_ids:
        return None
    return PromptScores(first - start, next_ids, top, request.prompt_logprobs)
