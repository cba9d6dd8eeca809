"""Drafts by a layer whose KV is a part of the target's blocks: multi-token prediction and EAGLE-3.

The layer is the model's own (engine/model/draft_layer.py) or that of a head (engine/model/eagle.py). Every step
computes its KV for the step's own tokens, on prefill nodes too (Runner.step), so it moves, is pooled and is restored
with the rest, and no node computes a prompt again to draft for it. What stays here is the layer's output behind a
request's last token. From this output comes the first token of the next draft, and from each token of the draft another
output. The layer then reads its own output in place of the model's, so later tokens are right less often. The KV of
draft tokens is written behind that of known tokens, and the step that verifies the draft writes over it.

A request without such an output has no draft in its next step: it has just come from another node.

The row of a block's last token depends on the token after the block, which is not part of the block's key. A request
that shares the block and goes on with another token reads the row as it is. Only drafts depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.sampling.logit_rules import SamplingRow
from engine.sampling.sampler import Sampled
from engine.step.inputs import Row
from engine.step.request import Request
from engine.step.runner import Runner
from engine.step.step import ScheduledRow

SAMPLE_WEIGHT = 0.2
"""Weight of one measurement in the moving average of a draft token's time."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The layer's output behind the last of a request's `num_tokens` tokens."""

    runner: Runner  # with the request's weights
    num_tokens: int
    output: Tensor  # [H]


@dataclass(slots=True)
class _Draft:
    """The draft of one row so far."""

    row: ScheduledRow
    ahead: _Ahead
    wants_probabilities: bool
    tokens: list[int] = field(default_factory=list)
    proposals: list[Tensor] = field(default_factory=list)

    def sampling(self, eos_ids: tuple[int, ...]) -> SamplingRow:
        """Log probabilities and grammar apply only to the target: it rejects tokens that the grammar forbids."""
        request = self.row.request
        return SamplingRow(
            replace(request.sampling, logprobs=None, grammar=""),
            request.token_ids,
            request.num_prompt_tokens,
            eos_ids=eos_ids,
            draft=tuple(self.tokens),
            wants_probabilities=self.wants_probabilities,
        )

    def keep(self, token: Sampled) -> None:
        self.tokens.append(token.token_id)
        if token.probabilities is not None:
            self.proposals.append(token.probabilities)

    def last(self) -> Row:
        """The last draft token, in the slot behind the KV of the layer so far."""
        start = self.row.start + len(self.tokens) - 1
        return Row(self.tokens[-1:], start, self.row.request.block_table())


class LayerDrafts:
    """`propose` runs in the engine thread; all other methods run on the event loop."""

    def __init__(self, rejection: bool, max_tokens: int) -> None:
        """rejection: as DraftModel (draft.py) has it. max_tokens: the model's maximum text length."""
        self.max_tokens = max_tokens
        self.step_seconds = 0.0  # of one draft token for all rows, moving average; 0: not measured yet
        self._rejection = rejection
        self._ahead: dict[str, _Ahead] = {}

    def goes_on(self, request: Request, num_tokens: int, runner: Runner, output: Tensor) -> None:
        """A step has brought the request to `num_tokens` tokens. output [H]: of the layer behind them."""
        if not request.finished:
            self._ahead[request.request_id] = _Ahead(runner, num_tokens, output)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._ahead.pop(request_id, None)

    def propose(self, rows: Sequence[ScheduledRow], eos_ids: tuple[int, ...]) -> Mapping[str, Sequence[Tensor]]:
        """As DraftModel.propose (draft.py)."""
        wanting = [row for row in rows if row.num_drafts]
        drafts: dict[str, _Draft] = {}
        for row in wanting:
            ahead = self._ahead.get(row.request.request_id)
            if ahead is not None and ahead.num_tokens == row.request.num_tokens:
                drafts[row.request.request_id] = _Draft(row, ahead, self._rejection)
        for runner in {id(draft.ahead.runner): draft.ahead.runner for draft in drafts.values()}.values():
            self._guess(runner, [draft for draft in drafts.values() if draft.ahead.runner is runner], eos_ids)
        for row in wanting:
            found = drafts.get(row.request.request_id)
            row.set_draft(found.tokens if found is not None else [])
        return {name: draft.proposals for name, draft in drafts.items() if draft.proposals}

    def _guess(self, runner: Runner, drafts: Sequence[_Draft], eos_ids: tuple[int, ...]) -> None:
        begin, depth = time.perf_counter(), max(draft.row.num_drafts for draft in drafts)
        outputs = torch.stack([draft.ahead.output for draft in drafts])
        while True:
            for draft, token in zip(drafts, runner.guess(outputs, [d.sampling(eos_ids) for d in drafts]), strict=True):
                draft.keep(token)
            left = [place for place, draft in enumerate(drafts) if len(draft.tokens) < draft.row.num_drafts]
            if not left:
                break
            drafts = [drafts[place] for place in left]
            outputs = runner.guess_on([draft.last() for draft in drafts], outputs[left])
        took = (time.perf_counter() - begin) / depth
        self.step_seconds += (took - self.step_seconds) * (SAMPLE_WEIGHT if self.step_seconds else 1.0)

    def state(self) -> dict[str, object]:
        """For /debug/state."""
        return {"requests": len(self._ahead), "step_ms": 1000 * self.step_seconds}
