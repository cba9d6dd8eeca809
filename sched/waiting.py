"""The wait for one of several equal servers, in the order of arrival: M/G/k by Allen-Cunneen, with an exponential tail.

It holds for Poisson arrivals and up to nine tenths of the capacity (reference/scheduling.md section 9, 1). Plans
(lab/formulas/plan.py) and the number of nodes that a running cluster wants (sched/scaling/need.py) use it.
"""

from __future__ import annotations


def erlang_c(servers: int, offered: float) -> float:
    """The share of arrivals that wait in M/M/k; offered < servers, both counted in busy servers."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def waiting(servers: int, offered: float, residual_s: float) -> tuple[float, float]:
    """(the share of arrivals that wait, the mean seconds that these wait); offered < servers.

    residual_s: E[S^2] / (2 E[S]) of the service times S, which is the mean time until a busy server is free again.
    P(wait > t) = share * exp(-t / mean)."""
    return erlang_c(servers, offered), residual_s / (servers - offered)
