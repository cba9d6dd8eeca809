"""The gated delta rule: linear attention whose past is one matrix per head (Yang et al., arXiv 2412.06464).

For each token of a head, with q and k of length 1 (q divided by sqrt(key_size)), a decay g <= 0 and a rate b:

    S <- e^g S      u = b (v - S^T k)      S <- S + k u^T      o = S^T q                    S [key_size, value_size]

g is one number per head, or one for each channel of the key, a row of S (Kimi Linear, arXiv 2510.26692). `step`
computes this for one token of each request. `chunk` computes many tokens of one request in pieces of C tokens. With G
the sum of g within a piece and (X, Y)_ij = sum_c x_ic y_jc e^(G_ic - G_jc) for i >= j, else 0,

    [U | W] = (I + A)^-1 [b V | b e^G K]      A = (b K, K) below the diagonal; for all pieces at once
    V' = U - W S      O = (e^G Q) S + (Q, K) V'      S <- e^(G_C) S + (e^(G_C - G) K)^T V'            piece by piece

Exponents are masked before e^x, because those above the diagonal are positive. Key head h serves consecutive value
heads. Everything is computed in the type of the state: float32, or float64 as the yardstick of tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 64
"""Tokens of a piece: a triangular system of this size for each head and piece."""

CHANNEL_PIECE = 16
"""The same with a decay for each channel: e^(G_ic - G_jc) takes C^2 key_size elements per head, one piece at a time."""

EPS = 1e-6
"""Added to the squared length of q and k."""


def step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> Tensor:
    """q, k [N, key_heads, key_size]; v [N, value_heads, value_size]; decay [N, value_heads] or [N, value_heads,
    key_size]; rate [N, value_heads]; state [N, value_heads, key_size, value_size], changed in place. Returns o, as v,
    in the type of the state."""
    q, k, v, decay, rate = _prepared(q, k, v, decay, rate, state)
    state *= decay.exp()[..., None]
    known = (k[..., None, :] @ state)[..., 0, :]
    state += k[..., None] * ((v - known) * rate[..., None])[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :]


def chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [T, key_heads, key_size]; v [T, value_heads, value_size]; decay [T, value_heads] or [T, value_heads,
    key_size]; rate [T, value_heads]; state [value_heads, key_size, value_size]. Returns o, as v, and the state after
    the tokens, in its type."""
    num_tokens = len(q)
    size = min(PIECE if decay.dim() == 2 else CHANNEL_PIECE, num_tokens)
    q, k, v, decay, rate = (_in_pieces(x, size) for x in _prepared(q, k, v, decay, rate, state))
    total = decay.cumsum(2)  # [value_heads, pieces, size, key_size or 1]
    rated, gain = rate[..., None] * k, total.exp()
    system, scores = _pairs((rated, q), k, total)
    inputs = torch.cat((rate[..., None] * v, rated * gain), -1)
    solved = torch.linalg.solve_triangular(system, inputs, upper=False, unitriangular=True)
    written, read = solved.split((v.shape[-1], k.shape[-1]), -1)
    q, k = q * gain, k * (total[:, :, -1:] - total).exp()
    passed = gain[:, :, -1, :, None]
    out = torch.empty_like(v)
    for piece in range(v.shape[1]):
        new = written[:, piece] - read[:, piece] @ state
        out[:, piece] = q[:, piece] @ state + scores[:, piece] @ new
        state = passed[:, piece] * state + k[:, piece].mT @ new
    return out.flatten(1, 2)[:, :num_tokens].transpose(0, 1), state


def _pairs(rows: Sequence[Tensor], k: Tensor, total: Tensor) -> list[Tensor]:
    """(X, K) of the module for each X of `rows`, all [value_heads, pieces, size, key_size] -> [..., size, size]."""
    size = k.shape[2]
    above = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    if total.shape[-1] == 1:
        between = (total - total.mT).masked_fill(above, -torch.inf).exp()
        return [(x @ k.mT) * between for x in rows]
    found = [k.new_empty(*k.shape[:3], size) for _ in rows]
    for piece in range(k.shape[1]):
        between = total[:, piece, :, None] - total[:, piece, None]
        keys = between.masked_fill(above[..., None], -torch.inf).exp_().mul_(k[:, piece, None])
        for x, pairs in zip(rows, found, strict=True):
            pairs[:, piece] = (keys @ x[:, piece, :, :, None])[..., 0]
    return found


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In the type of the state; q and k of length 1 for each value head, q scaled; decay [.., key_size or 1]."""
    q, k, v, decay, rate = (x.to(state.dtype) for x in (q, k, v, decay, rate))
    decay = decay if decay.dim() == 3 else decay[..., None]
    each = v.shape[1] // k.shape[1]
    q, k = ((x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()).repeat_interleave(each, 1) for x in (q, k))
    return q * k.shape[-1] ** -0.5, k, v, decay, rate


def _in_pieces(x: Tensor, size: int) -> Tensor:
    """[T, heads, ...] -> [heads, pieces, size, ...]; zeros behind the last token leave the state as it is."""
    lacking = -len(x) % size
    if lacking:
        x = torch.cat((x, x.new_zeros(lacking, *x.shape[1:])))
    pieces: Tensor = x.unflatten(0, (-1, size)).movedim(2, 0)
    return pieces
