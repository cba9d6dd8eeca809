"""Orders of the prompt queue: which prompt is prefilled next. Pure; the simulator uses the same classes.

    fcfs           by arrival
    edf            by deadline: arrival + the first-token objective of the class
    srpt           fewest tokens left first, with ageing: rank = left * (1 - wait / A), 0 after A = 10 objectives
    weighted-fair  classes share prefill tokens 8 : 4 : 1 (start-time fair queueing), by arrival inside a class

Within one class, edf and weighted-fair are fcfs. No order starves a request. The requests that can pass one that
arrived at time a are bounded: fcfs: none. edf: those with an earlier deadline, so none that arrive after its deadline.
srpt: after a + A, no younger ones (hyperbolic ageing left / (1 + wait / A) has no such bound: its wait grows with the
ratio of two prompt lengths). weighted-fair: a waiting class gets weight / (sum of weights) of all prefill tokens.

Each step sorts all requests that have prompt tokens left, including begun ones, so that a short prompt passes a long
one at a chunk border.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from sched.classes import CLASSES, RANK, Classes

OVERDUE_OBJECTIVES = 10
"""A request is overdue (srpt) when it has waited this many first-token objectives of its class."""


class Prompt(Protocol):
    """The attributes of a request that an order uses."""

    @property
    def arrival(self) -> float:
        """Seconds, on the clock of `now`."""

    @property
    def service_class(self) -> str: ...

    @property
    def num_uncomputed(self) -> int:
        """Tokens left to prefill; cached ones do not count."""


J = TypeVar("J", bound=Prompt)


class QueueOrder(Protocol):
    """Sorts requests."""

    def order(self, now: float, jobs: Sequence[J]) -> list[J]:
        """The jobs, next one first. Has no side effects."""

    def served(self, job: Prompt, tokens: int) -> None:
        """Record that the step made from the last `order` has `tokens` tokens of `job`."""


class ByRank:
    """A stateless order: lowest rank first; equal ranks by arrival, then in the given order."""

    def __init__(self, classes: Classes = CLASSES) -> None:
        """`classes`: the objectives in force."""
        self.classes = classes

    def rank(self, now: float, job: Prompt) -> float:
        raise NotImplementedError

    def order(self, now: float, jobs: Sequence[J]) -> list[J]:
        return sorted(jobs, key=lambda job: (self.rank(now, job), job.arrival))

    def served(self, job: Prompt, tokens: int) -> None:
        """This order keeps no state."""


class FCFS(ByRank):
    """First come, first served."""

    def rank(self, now: float, job: Prompt) -> float:
        return job.arrival


class EDF(ByRank):
    """Earliest deadline first."""

    def rank(self, now: float, job: Prompt) -> float:
        return job.arrival + self.classes[job.service_class].ttft_s


class SRPT(ByRank):
    """Shortest remaining prefill first, with ageing: the factor is 1 at arrival and 0 when overdue."""

    def rank(self, now: float, job: Prompt) -> float:
        youth = 1.0 - (now - job.arrival) / (OVERDUE_OBJECTIVES * self.classes[job.service_class].ttft_s)
        return job.num_uncomputed * max(0.0, youth)


class WeightedFair:
    """Start-time fair queueing over classes (Goyal, Vin, Cheng: SIGCOMM 1996).

    Each class has a finish tag that grows by tokens / weight; the class with the smallest tag is next. Virtual time is
    the last start tag served. A class that was idle starts there, so idleness earns no credit.
    """

    def __init__(self, classes: Classes = CLASSES) -> None:
        self.classes = classes
        self._finish = dict.fromkeys(classes, 0.0)
        self._virtual = 0.0

    def order(self, now: float, jobs: Sequence[J]) -> list[J]:
        queues: dict[str, deque[J]] = {}
        for job in sorted(jobs, key=lambda job: job.arrival):
            queues.setdefault(job.service_class, deque()).append(job)
        tags = {name: self._start(name) for name in queues}
        ordered = []
        while tags:
            name = min(tags, key=lambda name: (tags[name], RANK[name]))
            job = queues[name].popleft()
            ordered.append(job)
            tags[name] += job.num_uncomputed / self.classes[name].weight
            if not queues[name]:
                del tags[name]
        return ordered

    def served(self, job: Prompt, tokens: int) -> None:
        name = job.service_class
        self._virtual = self._start(name)
        self._finish[name] = self._virtual + tokens / self.classes[name].weight

    def _start(self, name: str) -> float:
        return max(self._finish[name], self._virtual)


METHODS = ("order", "served")
"""Of an order in a user's file; it is made with the objectives of the classes."""

queue_orders: dict[str, Callable[[Classes], QueueOrder]] = {
    "fcfs": FCFS,
    "edf": EDF,
    "srpt": SRPT,
    "weighted-fair": WeightedFair,
}
"""Orders by their names on the command line. A new order is one class and one entry here."""
