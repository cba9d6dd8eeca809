"""The policies of the acceptors: one for all, or one for each acceptor if the policy learns.

As in production every node is an acceptor, and learns only from the requests that came to it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from lab.simulator.job import Job
from sched.placement.choice import LearningPolicy
from sched.placement.two_stages import TwoStages


class Acceptors:
    """`common`: the policy of all acceptors, or a sample of theirs."""

    def __init__(self, make: Callable[[], TwoStages], count: int, seed: int) -> None:
        """`count`: the nodes. The acceptor of a request is drawn."""
        self.common = make()
        self.learning: dict[int, TwoStages] = {}
        self._learns = isinstance(self.common, LearningPolicy)
        self._make, self._count = make, count
        self._rng = Random(f"acceptors {seed}")

    def policy_for(self, job: Job) -> TwoStages:
        """A request that is placed again keeps its acceptor."""
        if not self._learns:
            return self.common
        if job.acceptor < 0:
            job.acceptor = self._rng.randrange(self._count)
        if job.acceptor not in self.learning:
            self.learning[job.acceptor] = self._make()
        return self.learning[job.acceptor]

    def observed(self, job: Job) -> None:
        """The job has its first token."""
        if not self._learns:
            return
        policy = self.learning.get(job.acceptor)
        if isinstance(policy, LearningPolicy):
            policy.observed(job.prefill, job.estimates, job.first_token - job.sent)
