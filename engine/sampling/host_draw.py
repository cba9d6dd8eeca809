"""Draws tokens on the CPU, without sorting the vocabulary. The results are those of sampler.draw, computed for a few
rows at a time so that they stay in the cache.

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
from engine.sampling.race import race, race_among, race_numbers

ROWS_AT_ONCE = 8
"""1.5 MB of logits at a vocabulary of 49,152."""

SLACK = 1e-3
"""Relative; far above the error of the float32 exponentials, so that rounding drops no needed token."""


def draw_on_host(
    logits: Tensor, params: Sequence[SamplingParams], temperature: Tensor, floors: Tensor, keys: Sequence[int]
) -> Tensor:
    """Tokens [R] int64 for logits [R, V] float32 on the CPU.

    temperature [R], floors [R]: the smallest admitted value of (logit - largest) / temperature by min_p;
    keys [R]: signed 64-bit."""
    tokens = np.empty(len(params), dtype=np.int64)
    numbers = race_numbers(keys, logits.shape[1], logits.device)
    for begin in range(0, len(params), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        scaled, weights = _weights(logits[part], temperature[part])
        free = []
        for i, (row, weight) in enumerate(zip(scaled.numpy(), weights.numpy(), strict=True), begin):
            ids = _admitted(row, weight, params[i], floors[i].numpy())
            if ids is None:
                free.append(i)
            else:  # NaN logits admit no token
                tokens[i] = race_among(ids, weight[ids], numbers[i].numpy()) if len(ids) else 0
        if free:
            own = weights if len(free) == len(weights) else weights[[i - begin for i in free]]
            tokens[free] = race(own, numbers[free]).numpy()
    return torch.from_numpy(tokens)


def probabilities_on_host(
    logits: Tensor, params: Sequence[SamplingParams], temperature: Tensor, floors: Tensor
) -> Tensor:
    """[R, V] float32: the probabilities from which draw_on_host draws; same arguments."""
    scaled, weights = _weights(logits, temperature)
    for i, (row, weight) in enumerate(zip(scaled.numpy(), weights.numpy(), strict=True)):
        ids = _admitted(row, weight, params[i], floors[i].numpy())
        if ids is not None:
            kept = weight[ids]
            weight[:] = 0
            weight[ids] = kept
        weight /= weight.sum(dtype=np.float64)
    return weights


def _weights(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """[R, V] each: (logit - largest) / temperature, and its exponential."""
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled /= temperature[:, None]
    return scaled, scaled.exp()


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
