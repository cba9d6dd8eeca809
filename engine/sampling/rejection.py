"""The rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), for one position.

A draft token x was drawn from q; the target distribution is p. x is accepted with probability min(1, p(x) / q(x));
otherwise the token is drawn from (p - q)+ normalised. The outcome is distributed as p:

    P(token = x) = q(x) min(1, p(x) / q(x)) + (1 - sum min(p, q)) (p(x) - q(x))+ / sum (p - q)+  =  p(x)

because sum (p - q)+ = 1 - sum min(p, q). A rejected x has p(x) < q(x), so the second draw never returns it: x was
accepted if and only if the outcome equals x.

The two random numbers are from separate streams, independent of the stream of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampling.uniform import uniform


def judge(p: Tensor, token: int, q: Tensor, seed: int, position: int) -> int:
    """The token at `position`. p and q [V]: probabilities on one device; `token`: drawn from q."""
    if uniform(seed, position, b"keep") * float(q[token]) < float(p[token]):
        return token
    rest = (p - q).clamp_(min=0).cumsum(-1, dtype=torch.float64)
    total = float(rest[-1])
    if total <= 0:  # p equals q up to rounding, so nothing is rejected
        return token
    target = rest.new_tensor([uniform(seed, position, b"rest") * total])
    return min(int(torch.searchsorted(rest, target, right=True)), len(p) - 1)
