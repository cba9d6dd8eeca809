"""From a request to a worker: the policy of --placement over the known loads and prefixes of all workers.

A worker does the whole request: KV never moves between workers, so the path from one to another is infinitely long.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import ClassVar

import numpy as np

from cache.keys import extend_keys
from engine.backends.worker import Worker
from engine.front.clocks import Clocks
from engine.front.declined import no_placement, turned_away
from engine.front.placed import Placed
from engine.front.placing import PlacementRules, refusal
from engine.step.request import Request
from sched.admission import retry_after_s
from sched.placement.burst import Choice
from sched.placement.choice import LearningPolicy, Rejected
from sched.placement.demand import Demand
from sched.placement.links import Lines, Paths, Place
from sched.placement.measured_links import MeasuredLinks
from sched.placement.view import View

ROLE = "backend"


class Apart:
    """Links between workers: there are none."""

    places: ClassVar[Mapping[str, Place]] = {}

    def fetch(self, nodes: Sequence[str]) -> Lines:
        return np.full(len(nodes), inf), np.zeros(len(nodes))

    def handover(self, source: str, nodes: Sequence[str]) -> Lines:
        return self.fetch(nodes)

    def fetch_each(self, nodes: Sequence[str]) -> Paths:
        return array("d", (inf, 0.0)) * len(nodes)

    def handover_each(self, source: str, nodes: Sequence[str]) -> Paths:
        return self.fetch_each(nodes)


class WorkerPlacer:
    """Places requests for this node's acceptor on `workers`."""

    def __init__(self, rules: PlacementRules, workers: Sequence[Worker], block_size: int) -> None:
        """block_size: tokens; of the demands of requests. Each worker has its own."""
        self.clocks, self.links = Clocks(), MeasuredLinks()  # for FlightLog: workers report no times of their own
        self.block_size = block_size
        self._rules, self._workers = rules, workers

    def place(self, request: Request, avoid: Collection[str] = (), new: bool = True) -> Placed:
        """`avoid`: workers that failed or refused this request; `new`: no worker has begun it yet. Raises NotPlaced
        when no worker answers, every queue is full, the prompt fits nowhere, or a new request would miss its
        objectives."""
        begun = time.monotonic()
        workers = [one for one in self._workers if one.away is None]
        if not workers:
            none = Rejected("no worker of --backend answers", None, ROLE)
            raise no_placement(none, [], 0, time.monotonic() - begun)
        demand = Demand(
            num_tokens=request.num_tokens,
            max_tokens=request.sampling.max_tokens - request.num_output_tokens,
            pool_tokens=0,
            block_size=self.block_size,
            handover_token_bytes=0.0,
            fetch_token_bytes=0.0,
            service_class=request.service_class,
        )
        view = self._view(workers, begun)
        matched = np.array(self._matched(request, workers), dtype=np.float64)
        choice = Choice(self._rules.policy, begun, demand, view, matched if matched.any() else view.none, avoid)
        decision = choice.decide()
        if isinstance(decision, Rejected):
            raise no_placement(decision, [], 0, time.monotonic() - begun)
        if decision.decode != decision.prefill:  # a policy that decodes elsewhere if there is no room
            step_s = float(view.step_s[view.index[decision.prefill]])
            whole = decision.estimates | {"handover_s": 0.0, "step_s": step_s}
            decision = replace(decision, decode=decision.prefill, estimates=whole)
        if new and (found := refusal(self._rules.rejection, decision, request.service_class, view)) is not None:
            raise turned_away(found, decision, [], 0, time.monotonic() - begun)
        return Placed(decision, [], 0, time.monotonic() - begun)

    def room(self) -> tuple[int, float]:
        """(requests that may wait for their first token, Retry-After in seconds if that number waits)"""
        now = time.monotonic()
        workers = [one for one in self._workers if one.away is None]
        retry_s = retry_after_s((one.load.waiting, one.load.work_s(now)) for one in workers)
        return max(1, len(workers)) * (self._rules.max_waiting + 1), retry_s

    def missing_role(self) -> str:
        """Not empty while no worker answers."""
        return ROLE if all(one.away is not None for one in self._workers) else ""

    def learn(self, prefill: str, estimates: Mapping[str, float], ttft_s: float) -> None:
        """The measured time from a decision for worker `prefill`, with these estimates, to its first token."""
        if isinstance(self._rules.policy, LearningPolicy):
            self._rules.policy.observed(prefill, estimates, ttft_s)

    def _view(self, workers: Sequence[Worker], now: float) -> View:
        nodes = [one.load.candidate(one.name, now, self.block_size) for one in workers]
        return View(now, nodes, Apart(), self._rules.max_waiting, tolls=False)  # a worker does both of a request

    def _matched(self, request: Request, workers: Sequence[Worker]) -> list[int]:
        """Leading tokens of the prompt that each worker holds; the last token is always computed."""
        if not self._rules.prefix_caching:
            return [0] * len(workers)
        sizes = {one.prefixes.block_size for one in workers} - {0}
        known = request.token_ids[: request.num_tokens - 1]
        keys = {size: extend_keys(request.root, [], known, size) for size in sizes}
        return [one.prefixes.matched_tokens(keys.get(one.prefixes.block_size, ())) for one in workers]
