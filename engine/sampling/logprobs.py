"""Log probabilities of known tokens: of sampled tokens and of a prompt's.

They are natural logarithms of the raw distribution, the softmax of the model's unchanged logits.

The logits [tokens, vocab_size] of a prompt take two hundred megabytes for a thousand tokens. The model therefore
returns them in parts of SCORED_AT_ONCE rows, and only the requested numbers of each row are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling.params import TokenLogprobs
from engine.sampling.token_logprobs import PromptLogprobs


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens whose log probabilities a row of a step requests: those after the tokens `first`, first + 1, ... of
    the row. The step appends its results in order."""

    first: int
    next_ids: Sequence[int]
    top: int  # number of best alternatives per token
    found: PromptLogprobs = field(default_factory=PromptLogprobs)


def token_ranks(logits: Tensor, tokens: Tensor) -> list[int]:
    """For each row of logits [R, V]: 1 + the number of tokens likelier than tokens[r]."""
    own = logits.gather(1, tokens[:, None])
    return ((logits > own).sum(-1) + 1).tolist()


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [R, V] float32: the log probabilities of tokens[r] and of the counts[r] best tokens, best
    first; equal ones by token id."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None]).squeeze(-1).tolist()
    values, ids = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    found = []
    for logprob, count, top_ids, top in zip(own, counts, ids.tolist(), values.tolist(), strict=True):
        pairs = sorted(zip(top_ids, top, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprobs(logprob, pairs[:count]))
    return found


class PromptRows:
    """The scored positions of one step, for `scores` of Model.forward. This class scores nothing: it is for ranks other
    than the first, which have only a part of the logits.

    rows [S] int64: indices of the step's tokens [T]."""

    def __init__(
        self,
        asked: Sequence[PromptScores | None],
        order: Sequence[int],
        q_lens: Sequence[int],
        device: torch.device,
    ) -> None:
        """asked: the request of each row. Row order[s] has q_lens[s] tokens of the step; requests are consecutive."""
        places: list[int] = []
        self.asked: list[PromptScores] = []
        first = 0
        for i, q_len in zip(order, q_lens, strict=True):
            scores = asked[i]
            if scores is not None:
                begin = first + scores.first
                places += range(begin, begin + len(scores.next_ids))
                self.asked.append(scores)
            first += q_len
        self.rows = torch.tensor(places, dtype=torch.int64, device=device)

    def take(self, first: int, logits: Tensor) -> None:
        """Logits [C, V] float32 of rows[first : first + C]; the parts come in order."""


class PromptScorer(PromptRows):
    """Scores the positions and appends the results to each request's PromptScores."""

    def __init__(
        self,
        asked: Sequence[PromptScores | None],
        order: Sequence[int],
        q_lens: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__(asked, order, q_lens, device)
        self._next = torch.tensor([token for scores in self.asked for token in scores.next_ids], device=device)
        self._owners = [scores for scores in self.asked for _ in scores.next_ids]

    def take(self, first: int, logits: Tensor) -> None:
        owners = self._owners[first : first + len(logits)]
        tokens = self._next[first : first + len(logits)]
        found = token_logprobs(logits, tokens, [owner.top for owner in owners])
        for owner, logprobs, rank in zip(owners, found, token_ranks(logits, tokens), strict=True):
            logprobs.rank = rank
            owner.found.append(logprobs)
