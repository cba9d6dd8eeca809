"""The rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), for one position.

A draft token x was drawn from q; the target distribution is p. x is accepted with probability min(1, p(x) / q(x));
otherwise the token is drawn from (p - q)+ normalised. The outcome is distributed as p:

    P(token = x) = q(x) min(1, p(x) / q(x)) + (1 - sum min(p, q)) (p(x) - q(x))+ / sum (p - q)+  =  p(x)

because sum (p - q)+ = 1 - sum min(p, q). A rejected x has p(x) < q(x), so the second draw never returns it: x was
accepted if and only if the outcome equals x.

The random numbers of the two decisions are from separate streams, independent of the stream of x.
"""

from __future__ import annotations

from torch import Tensor

from engine.sampling.race import race, race_numbers
from engine.sampling.uniform import stream_key, uniform


def judge(p: Tensor, token: int, q: Tensor, seed: int, position: int) -> int:
    """The token at `position`. p and q [V]: probabilities on one device; `token`: drawn from q."""
    if uniform(seed, position, b"keep") * float(q[token]) < float(p[token]):
        return token
    rest = (p - q).clamp_(min=0)
    if not rest.any():  # p equals q up to rounding, so nothing is rejected
        return token
    return int(race(rest[None], race_numbers([stream_key(seed, position, b"rest")], len(rest), rest.device)))
