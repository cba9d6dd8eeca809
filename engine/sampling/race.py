"""Draws an index with a probability proportional to its weight, by a race of exponential random numbers.

With independent E_i ~ Exp(1), the index with the largest w_i / E_i is i with probability w_i / sum w. (Its logarithm,
log w_i - log E_i, is the Gumbel-max trick.) Rounding changes the index only if it exchanges the first two of the race:
weights with a total variation distance of t give another index with a probability of at most 2 t / (1 + t) (Daliri et
al., arXiv 2408.07978). Inverting the cumulative sum at one random number has no such bound: a change of one weight
moves the intervals of all later indices.

Two heats need V / PIECE + PIECE random numbers instead of V. The first chooses a piece of PIECE consecutive indices by
the sums of their weights, the second an index of that piece: (W_piece / W) (w_i / W_piece) = w_i / W. The second heat
may use the same numbers for every piece, because only one piece gets there.

The random numbers are SplitMix64 (Steele et al., OOPSLA 2014) of a key and a counter, in integers, so every device has
the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

PIECE = 256
"""Near the square root of a vocabulary of 49,152 or 128,256."""

_GOLDEN, _FIRST, _SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""SplitMix64's constants as torch's signed integers."""


def race(weights: Tensor, numbers: Tensor) -> Tensor:
    """Indices [R] int64 for weights [R, V] >= 0 with a positive sum per row, and the rows' `race_numbers`. A row of NaN
    or zeros gets an arbitrary index below V."""
    rows, vocab = weights.shape
    if vocab % PIECE:
        weights = pad(weights, (0, -vocab % PIECE))
    pieces = weights.view(rows, -1, PIECE)
    first, second = numbers[:, : pieces.shape[1]], numbers[:, pieces.shape[1] :]
    piece = (pieces.sum(-1) / first).argmax(-1)
    inside = pieces[torch.arange(rows, device=weights.device), piece]
    return piece * PIECE + (inside / second).argmax(-1)


def race_among(ids: np.ndarray, weights: np.ndarray, numbers: np.ndarray) -> int:
    """The same for one row on the CPU in which only the ascending `ids` [n > 0] have weights [n]; numbers [N]."""
    owners, count = ids // PIECE, len(numbers) - PIECE
    piece = np.argmax(np.bincount(owners, weights, count) / numbers[:count])
    begin, end = np.searchsorted(owners, (piece, piece + 1))
    inside = ids[begin:end]
    return int(inside[np.argmax(weights[begin:end] / numbers[count + inside % PIECE])])


def race_numbers(keys: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    """[R, ceil(V / PIECE) + PIECE] float64: independent numbers of the exponential distribution with mean 1, for both
    heats of rows with these signed 64-bit keys."""
    count = -(-vocab // PIECE) + PIECE
    x = torch.tensor(keys, device=device)[:, None] + torch.arange(1, count + 1, device=device) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    x = x ^ _shifted(x, 31)
    return _shifted(x, 12).double().add_(0.5).mul_(2.0**-52).log_().neg_()  # of a number in (0, 1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of unsigned integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
