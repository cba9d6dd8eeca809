"""Samples the next tokens of a batch.

Greedy rows take the largest logit. The others draw from softmax(logits / temperature), restricted in this order by

    min_p    tokens at least min_p times as probable as the best
    top_k    the k most probable
    top_p    the smallest set of the most probable remaining tokens whose sum reaches top_p

Each restriction is one threshold on the logit, so tokens tied with the last admitted one are also admitted, and the set
does not depend on how a sort breaks ties. The draw (race.py) uses random numbers that are hashes of (seed, position): a
request that continues on another node, or in another batch, continues its stream, and the different rounding there
seldom changes a token.

Log probabilities are those of the raw distribution: before penalties, bias, temperature and restrictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.host_draw import draw_on_host, probabilities_on_host
from engine.sampling.logit_rules import Masks, SamplingRow, apply_rules
from engine.sampling.logprobs import token_logprobs
from engine.sampling.params import SamplingParams, TokenLogprobs
from engine.sampling.race import race, race_numbers
from engine.sampling.rejection import judge
from engine.sampling.uniform import stream_key

__all__ = ["Sampled", "SamplingRow", "sample"]

MIN_TEMPERATURE = 1e-6
"""Below this, only the best tokens have any weight in float32, and a smaller divisor would overflow."""

MAX_TEMPERATURE = 1e30
"""Above this, all tokens are equally likely in float32; and it has no number beyond 3e38: a banned token's logit, minus
infinity, divided by infinity would be no number, and draws would take it."""


@dataclass(slots=True)
class Sampled:
    """One chosen token; `logprobs` if the row's params request them."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    probabilities: Tensor | None = None  # [V] float32, from which the token was drawn; if the row requests it


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow], masks: Masks | None = None) -> list[Sampled]:
    """Choose a token for each row of logits [R, V] float32, without changing them. `masks`: for rows with a grammar."""
    if not rows:
        return []
    changed = apply_rules(logits, rows, masks)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) == len(rows):
        tokens = _draw(changed, rows)
    else:
        tokens = _best(changed)
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            tokens[index] = _draw(changed[index], [rows[i] for i in drawn])
    known = _judge(changed, rows, tokens)
    logprobs = _logprobs(logits, rows, tokens)
    return [Sampled(token, logprobs.get(i), known.get(i)) for i, token in enumerate(tokens.tolist())]


def _judge(logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor) -> dict[int, Tensor]:
    """Replace the tokens of rows with a proposal by the outcome of the rejection rule. Returns the probabilities of
    rows that request them."""
    asked = [i for i, r in enumerate(rows) if (r.proposal or r.wants_probabilities) and not r.params.greedy]
    if not asked:
        return {}
    known = dict(zip(asked, probabilities(logits[asked], [rows[i].params for i in asked]), strict=True))
    for i in asked:
        row = rows[i]
        if row.proposal is not None:
            tokens[i] = judge(known[i], *row.proposal, _seed(row), row.position)
    return {i: p for i, p in known.items() if rows[i].wants_probabilities}


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, V] float32: the distributions for drawing tokens, from logits [R, V] after the rules."""
    temperature = _temperature(logits, params)
    if logits.device.type == "cpu":
        return probabilities_on_host(logits, params, temperature, _min_p_floors(logits, params))
    weights = _weights(logits, params, temperature)
    return weights / weights.sum(-1, keepdim=True)


def _temperature(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return logits.new_tensor([min(max(p.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE) for p in params])


def _seed(row: SamplingRow) -> int:
    return row.seed if row.params.seed is None else row.params.seed


def _best(logits: Tensor) -> Tensor:
    """Argmax of every row; the first of equal ones. For a row of 49,152 logits, numpy takes 7 us, torch on the CPU
    66 us."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Tokens [R] drawn from logits [R, V]."""
    params = [row.params for row in rows]
    temperature = _temperature(logits, params)
    keys = [stream_key(_seed(row), row.position) for row in rows]
    if logits.device.type == "cpu":
        return draw_on_host(logits, params, temperature, _min_p_floors(logits, params), keys)
    return draw(logits, params, temperature, keys)


def draw(logits: Tensor, params: Sequence[SamplingParams], temperature: Tensor, keys: Sequence[int]) -> Tensor:
    """Tokens [R] for logits [R, V], temperature [R] and signed 64-bit keys, on any device; all rows in one pass."""
    numbers = race_numbers(keys, logits.shape[1], logits.device)
    return race(_weights(logits, params, temperature), numbers)


def _weights(logits: Tensor, params: Sequence[SamplingParams], temperature: Tensor) -> Tensor:
    """[R, V]: exp((logit - largest) / temperature) of admitted tokens, 0 of others."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    return scaled.exp().masked_fill_(scaled < _floors(scaled, params), 0)


def _min_p_floors(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R]: the smallest value of (logit - largest) / temperature that min_p admits."""
    return logits.new_tensor([p.min_p for p in params]).log()


def _floors(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, 1]: the smallest admitted value of each row of scaled logits [R, V], whose maximum is 0."""
    vocab = scaled.shape[1]
    floors = _min_p_floors(scaled, params)[:, None]
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    if limited:
        index = torch.tensor(limited, device=scaled.device)
        floors[index] = _top_floors(scaled[index], [params[i] for i in limited], floors[index])
    return floors


def _top_floors(scaled: Tensor, params: Sequence[SamplingParams], floor: Tensor) -> Tensor:
    """`floor` [R, 1] raised by top_k, then by top_p."""
    vocab = scaled.shape[1]
    best = scaled.sort(-1, descending=True).values
    last = [min(p.top_k, vocab) - 1 if p.top_k > 0 else vocab - 1 for p in params]
    floor = torch.maximum(floor, best.gather(1, torch.tensor(last, device=scaled.device)[:, None]))
    share = best.double().masked_fill_(best < floor, -torch.inf).softmax(-1)
    before = share.cumsum(-1) - share
    top_p = share.new_tensor([p.top_p for p in params])[:, None]
    admitted = ((before < top_p) & (best >= floor)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.where(top_p < 1, best.gather(1, admitted - 1), floor)


def _logprobs(logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor) -> dict[int, TokenLogprobs]:
    """Log probabilities by row index, for the rows that request them."""
    asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if not asked:
        return {}
    index = torch.tensor(list(asked), device=logits.device)
    return dict(zip(asked, token_logprobs(logits[index], tokens[index], list(asked.values())), strict=True))
