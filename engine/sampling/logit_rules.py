"""Changes a row's logits before sampling: penalties, logit bias, minimum length, banned and allowed tokens, grammar.

The rules in order, for a row with the counts of its tokens so far:

    repetition   l > 0 ? l / r : l * r            tokens of prompt and output
    frequency    l - f * count                    tokens of the output
    presence     l - p                            tokens of the output
    logit bias   l + b                            after the penalties, so that -100 and 100 always ban and force
    min_tokens   l = -inf for tokens that would end the output too early
    bad words    l = -inf for tokens that would complete a banned sequence of tokens
    allowed ids  l = -inf for all other tokens; if the two rules above ban all of them, these two do not count
    grammar      l = -inf for tokens that the grammar does not allow next

numpy counts tokens on the host; each rule is one scatter over all rows of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.sampling.params import SamplingParams

MOST = 1e30
"""Repetition penalties beyond it, or below its inverse, do the same, and float32 has no numbers for their results."""


@dataclass(slots=True)
class SamplingRow:
    """The request of one row of logits. The new token gets the position len(token_ids) + len(draft)."""

    params: SamplingParams
    token_ids: Sequence[int]  # prompt, then output so far
    num_prompt_tokens: int  # of the client's prompt, also if the request was resumed on another node
    seed: int = 0  # used if params.seed is None
    eos_ids: tuple[int, ...] = ()
    draft: Sequence[int] = ()  # draft tokens after token_ids (speculation); they count as output
    proposal: tuple[int, Tensor] | None = None  # a draft of the new token and its distribution: rejection.py
    wants_probabilities: bool = False  # of the new token: the draft model samples this row

    @property
    def position(self) -> int:
        return len(self.token_ids) + len(self.draft)

    @property
    def ending_ids(self) -> set[int]:
        """Tokens that would end the output here, before min_tokens."""
        if self.position - self.num_prompt_tokens >= self.params.min_tokens:
            return set()
        return {*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos_ids)}

    @property
    def banned_ids(self) -> set[int]:
        """Tokens that would end the output too early, or complete a bad word."""
        params, banned = self.params, self.ending_ids
        if params.bad_words:
            longest = max(map(len, params.bad_words)) - 1
            written = [*self.token_ids[max(self.num_prompt_tokens, len(self.token_ids) - longest) :], *self.draft]
            banned |= {word[-1] for word in params.bad_words if _ends_with(written, word[:-1])}
        return set() if params.allowed_token_ids and banned >= set(params.allowed_token_ids) else banned


class Masks(Protocol):
    """The sampler's interface to grammars (grammar.py)."""

    def allowed(self, grammar: str, output: Sequence[int]) -> np.ndarray:
        """[at most V] bool: the tokens that may follow `output`."""
        ...


def apply_rules(logits: Tensor, rows: Sequence[SamplingRow], masks: Masks | None = None) -> Tensor:
    """logits [R, V] float32 with every row's rules applied; the input itself if no rule applies. `masks` is required if
    a row has a grammar."""
    if not any(row.params.has_rules for row in rows):
        return logits
    vocab = logits.shape[1]
    penalised = [_penalties(i, row) for i, row in enumerate(rows) if row.params.has_penalty]
    bias = [(i, token, b) for i, row in enumerate(rows) for token, b in row.params.logit_bias.items()]
    ends = [(i, token) for i, row in enumerate(rows) for token in row.banned_ids]
    only = [(i, row.params.allowed_token_ids) for i, row in enumerate(rows) if row.params.allowed_token_ids]
    # Ids outside the vocabulary have no logit. The API refuses them; here they must not change other rows.
    bias = [entry for entry in bias if 0 <= entry[1] < vocab]
    ends = [entry for entry in ends if 0 <= entry[1] < vocab]
    allowed = [(i, _allowed(row, masks)) for i, row in enumerate(rows) if row.params.grammar]
    if not (penalised or bias or ends or only or allowed):
        return logits
    logits = logits.clone()
    if penalised:
        at = _index(logits, np.concatenate([p[0] for p in penalised]))
        repetition, subtract = torch.from_numpy(np.concatenate([p[1] for p in penalised], axis=1)).to(logits)
        old = logits[at]
        logits[at] = torch.where(old > 0, old / repetition, old * repetition) - subtract
    if bias:
        at = _index(logits, np.array([entry[:2] for entry in bias]))
        logits[at] += torch.tensor([entry[2] for entry in bias]).to(logits)
    if ends:
        logits[_index(logits, np.array(ends))] = -torch.inf
    for i, ids in only:
        kept = torch.tensor([token for token in ids if 0 <= token < vocab], device=logits.device)
        values = logits[i, kept]
        logits[i] = -torch.inf
        logits[i, kept] = values
    for i, mask in allowed:
        admitted = torch.from_numpy(mask[:vocab]).to(logits.device)
        logits[i, : len(admitted)].masked_fill_(~admitted, -torch.inf)
        logits[i, len(admitted) :] = -torch.inf  # padding, which belongs to no token
    return logits


def _ends_with(written: Sequence[int], ids: Sequence[int]) -> bool:
    return not ids or tuple(written[-len(ids) :]) == tuple(ids)


def _allowed(row: SamplingRow, masks: Masks | None) -> np.ndarray:
    if masks is None:
        raise RuntimeError("a request with a grammar reached a sampler without grammars")
    return masks.allowed(row.params.grammar, [*row.token_ids[row.num_prompt_tokens :], *row.draft])


def _penalties(index: int, row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (row, token) [N, 2] of all tokens so far, and [2, N]: repetition divisors and subtracted penalties."""
    params, ids = row.params, np.array([*row.token_ids, *row.draft], dtype=np.int64)
    tokens = np.unique(ids)
    written, counts = np.unique(ids[row.num_prompt_tokens :], return_counts=True)
    change = np.zeros((2, len(tokens)))
    change[0] = min(max(params.repetition_penalty, 1 / MOST), MOST)
    change[1, np.searchsorted(tokens, written)] = params.frequency_penalty * counts + params.presence_penalty
    return np.stack((np.full_like(tokens, index), tokens), axis=1), change


def _index(logits: Tensor, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
    row, token = torch.from_numpy(np.ascontiguousarray(pairs.T)).to(logits.device)
    return row, token
