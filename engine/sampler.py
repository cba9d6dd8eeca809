"""Batched choice of the next token.

Greedy rows take the largest logit. The others draw from softmax(logits / temperature) restricted, in this order, by

    min_p    tokens at least min_p times as probable as the best
    top_k    the k most probable
    top_p    of what is left, the smallest set of most probable tokens that holds the share top_p

Each restriction is one threshold on the logit, so tokens tied with the last admitted one are admitted too and the set
does not depend on how a sort breaks ties. The draw inverts the cumulative distribution at one uniform number that is a
hash of (seed, position): a request that continues on another node, or beside other requests, continues its stream.

Log probabilities are those of the raw distribution: before penalties, bias, temperature and restrictions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from engine.logit_rules import SamplingRow, apply_rules
from engine.request import SamplingParams, TokenLogprobs

__all__ = ["Sampled", "SamplingRow", "sample"]

NUCLEUS_WIDTH = 512
"""top_p first looks at this many best tokens: they hold the share in most rows, and sorting all of a vocabulary of
50,000 takes several times as long as the layers of a small model."""

MIN_TEMPERATURE = 1e-6
"""Below this only the best tokens have any weight in float32; dividing by less would overflow."""


@dataclass(slots=True)
class Sampled:
    """One chosen token; `logprobs` when the row's params ask for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
    """Choose a token for each row of logits [R, V] float32, which are left as they are."""
    if not rows:
        return []
    changed = apply_rules(logits, rows)
    tokens = changed.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(changed[index], [rows[i] for i in drawn])
    logprobs = _logprobs(logits, rows, tokens)
    return [Sampled(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` of a request with this seed.

    52 bits, so that its product with any float64 total stays below the total.
    """
    digest = blake2b(struct.pack("<qq", seed, position), digest_size=8, person=b"mooncake-draw").digest()
    return (int.from_bytes(digest, "little") >> 12) * 2.0**-52


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Tokens [R] drawn from logits [R, V]."""
    params = [row.params for row in rows]
    temperature = logits.new_tensor([max(p.temperature, MIN_TEMPERATURE) for p in params])
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    weights = scaled.exp().masked_fill_(scaled < _floors(scaled, params), 0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    draws = [uniform(row.seed if row.params.seed is None else row.params.seed, row.position) for row in rows]
    target = cumulative.new_tensor(draws)[:, None] * cumulative[:, -1:]
    # The clamp is for logits that are NaN: a wrong token in one row, not an id outside of the vocabulary.
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[1] - 1)


def _floors(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """[R, 1]: the smallest admitted value of each row of scaled logits [R, V], whose maximum is 0."""
    vocab = scaled.shape[1]
    floors = scaled.new_tensor([p.min_p for p in params]).log()[:, None]
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1]
    if limited:
        top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in (params[i] for i in limited)]
        top_p = [params[i].top_p for i in limited]
        index = torch.tensor(limited, device=scaled.device)
        # One more than k: the value after the last admitted one shows that nothing is tied with it.
        width = max(k + 1 if k < vocab else NUCLEUS_WIDTH for k in top_k)
        floors[index] = _top_floors(scaled[index], top_k, top_p, floors[index], min(width, vocab))
    return floors


def _top_floors(scaled: Tensor, top_k: list[int], top_p: list[float], floor: Tensor, width: int) -> Tensor:
    """`floor` [R, 1] raised by top_k and top_p, judged by the `width` best of each row, or by all if those are few."""
    vocab = scaled.shape[1]
    best = scaled.topk(width, dim=-1).values
    k = torch.tensor(top_k, device=scaled.device)[:, None]
    kth = best.gather(1, k.clamp(max=width) - 1)
    floor = torch.where(k < vocab, torch.maximum(floor, kth), floor)

    total = scaled.double().masked_fill_(scaled < floor, -torch.inf).logsumexp(-1, keepdim=True)
    share = (best - total).exp().masked_fill_(best < floor, 0)
    before = share.cumsum(-1) - share
    p = before.new_tensor(top_p)[:, None]
    admitted = ((before < p) & (best >= floor)).sum(-1, keepdim=True)
    raised = torch.where(p < 1, best.gather(1, admitted - 1), floor)

    open_end = (p < 1) & (admitted == width) & (best[:, -1:] >= floor)
    wider = torch.nonzero(open_end.squeeze(-1)).flatten()
    if width < vocab and len(wider):
        rows = wider.tolist()
        again = _top_floors(scaled[wider], [top_k[i] for i in rows], [top_p[i] for i in rows], floor[wider], vocab)
        raised[wider] = again
    return raised


def _logprobs(logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor) -> dict[int, TokenLogprobs]:
    """By row index, for the rows that ask. Best first; equal ones by token id."""
    asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if not asked:
        return {}
    index = torch.tensor(list(asked), device=logits.device)
    logprobs = logits[index].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[index][:, None]).squeeze(-1).tolist()
    values, ids = logprobs.topk(min(max(asked.values()), logits.shape[1]), dim=-1)
    result = {}
    for (i, count), own, top_ids, top in zip(asked.items(), chosen, ids.tolist(), values.tolist(), strict=True):
        pairs = sorted(zip(top_ids, top, strict=True), key=lambda pair: (-pair[1], pair[0]))
        result[i] = TokenLogprobs(own, pairs[:count])
    return result
