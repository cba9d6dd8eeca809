"""Draws on the CPU: the same results as sampler.draw, computed for a few rows at a time so that they stay in the cache,
without sorting the vocabulary.

top_p needs the most probable tokens in order until their sum reaches top_p. All tokens less probable than
(1 - top_p) / vocab_size together have less than 1 - top_p, so none of them is needed. This leaves about a hundred of a
language model's 49,152 tokens to sort (0.1 ms per row instead of 1.5 ms).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.params import SamplingParams

ROWS_AT_ONCE = 8
"""1.5 MB of logits at a vocabulary of 49,152."""

PIECE_WEIGHTS = 512

SLACK = 1e-3
"""Relative; far above the error of the float32 exponentials, so that rounding drops no needed token."""


def draw_on_host(
    logits: Tensor, params: Sequence[SamplingParams], temperature: Tensor, floors: Tensor, uniforms: Sequence[float]
) -> Tensor:
    """Tokens [R] int64 for logits [R, V] float32 on the CPU.

    temperature [R], floors [R]: the smallest admitted value of (logit - largest) / temperature by min_p;
    uniforms [R] in [0, 1)."""
    tokens = np.empty(len(params), dtype=np.int64)
    for begin in range(0, len(params), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        scaled = logits[part] - logits[part].amax(-1, keepdim=True)
        scaled /= temperature[part, None]
        weights = scaled.exp()
        for i, (row, weight) in enumerate(zip(scaled.numpy(), weights.numpy(), strict=True), begin):
            tokens[i] = _draw(row, weight, params[i], floors[i].numpy(), uniforms[i])
    return torch.from_numpy(tokens)


def probabilities_on_host(
    logits: Tensor, params: Sequence[SamplingParams], temperature: Tensor, floors: Tensor
) -> Tensor:
    """[R, V] float32: the probabilities from which draw_on_host draws; same arguments."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    weights = scaled.exp()
    for i, (row, weight) in enumerate(zip(scaled.numpy(), weights.numpy(), strict=True)):
        ids = _admitted(row, weight, params[i], floors[i].numpy())
        if ids is not None:
            kept = weight[ids]
            weight[:] = 0
            weight[ids] = kept
        weight /= weight.sum(dtype=np.float64)
    return weights


def _draw(scaled: np.ndarray, weights: np.ndarray, params: SamplingParams, floor: np.ndarray, uniform: float) -> int:
    """One token; weights = exp(scaled) [V]; the maximum of scaled is 0. If logits are NaN, the token is arbitrary."""
    ids = _admitted(scaled, weights, params, floor)
    if ids is None:
        return _invert(weights, uniform)
    return int(ids[_invert(weights[ids], uniform)]) if len(ids) else len(scaled) - 1


def _invert(weights: np.ndarray, uniform: float) -> int:
    """The first index at which the cumulative sum of the weights exceeds `uniform` times their total. Sums pieces
    first, then searches one piece: a cumulative sum of all weights takes five times as long."""
    pieces = np.add.reduceat(weights, np.arange(0, len(weights), PIECE_WEIGHTS), dtype=np.float64)
    sums = pieces.cumsum()
    target = uniform * sums[-1]
    piece = min(int(sums.searchsorted(target, "right")), len(sums) - 1)
    begin = PIECE_WEIGHTS * piece
    inside = weights[begin : begin + PIECE_WEIGHTS].cumsum(dtype=np.float64)
    at = int(inside.searchsorted(target - (sums[piece] - pieces[piece]), "right"))
    if at == len(inside):  # the two sums of this piece were rounded differently: its last token with any weight
        at = int(inside.searchsorted(inside[-1]))
    return min(begin + at, len(weights) - 1)


def _admitted(scaled: np.ndarray, weights: np.ndarray, params: SamplingParams, floor: np.ndarray) -> np.ndarray | None:
    """Ids of the admitted tokens, ascending; None: all."""
    if 0 < params.top_k < len(scaled):
        floor = np.maximum(floor, np.partition(scaled, len(scaled) - params.top_k)[-params.top_k])
    if params.top_p == 1:
        return None if floor == -np.inf else np.flatnonzero(scaled >= floor)
    least = 0.0
    if floor == -np.inf:
        total = weights.sum(dtype=np.float64)
        least = (1 - SLACK) * (1 - params.top_p) / len(scaled) * total
        ids = np.flatnonzero(weights > least)
    else:
        ids = np.flatnonzero(scaled >= floor)
    values = scaled[ids]
    best = np.sort(values)[::-1].astype(np.float64)
    exact = np.exp(best)
    share = exact / (total if least else exact.sum())
    before = share.cumsum() - share
    count = max(1, int((before < params.top_p).sum()))
    return ids[values >= best[count - 1]] if len(ids) else ids
