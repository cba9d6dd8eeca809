"""From what the batcher scheduled to what the runner computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.inputs import Row
from engine.sampling.logit_rules import SamplingRow
from engine.step import ScheduledRow

if TYPE_CHECKING:
    from torch import Tensor


def row_of(scheduled: ScheduledRow, eos_token_ids: tuple[int, ...], proposals: Sequence[Tensor] = ()) -> Row:
    """For the runner, which is done with it before the request changes: its lists are shared, not copied."""
    request, sample = scheduled.request, None
    if scheduled.samples:
        sample = SamplingRow(request.sampling, request.token_ids, request.num_prompt_tokens, eos_ids=eos_token_ids)
    known = scheduled.num_tokens - len(scheduled.draft)
    token_ids = request.token_ids[scheduled.start : scheduled.start + known] + scheduled.draft
    return Row(token_ids, scheduled.start, request.block_table(), sample, 1 + len(scheduled.draft), proposals)
