"""One cluster under a stream of requests in virtual time, with the scheduler's own classes: placement and rejection."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sched.admission import Limits
from sched.classes import CLASSES
from sched.cost import TransferModel
from sched.placements.choice import Placement
from sched.placements.demand import Demand
from sched.placements.links import UniformLinks
from sched.placements.table import placements
from sched.placements.view import Candidate, View
from sched.rejection import Estimate, rejections
from scripts.overloadbench.machines import Decode, Prefill, Speed

MAX_RUNNING = 256
BLOCKS = 1 << 20
LINKS = UniformLinks(TransferModel(1e-4, 50e9), TransferModel(1e-4, 50e9))
MIX = (("interactive", 0.5), ("standard", 0.5))


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: int
    output: int
    service_class: str


@dataclass(slots=True)
class Flight:
    """A request that was let in."""

    arrival: Arrival
    prefilled: float
    target: int
    joined: float = 0.0


@dataclass(slots=True)
class Result:
    """Counts of one run; `good` requests kept both objectives of their class."""

    offered: int = 0
    good: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    prefill_tokens: int = 0
    wasted_tokens: int = 0  # prefilled for requests that were then refused
    late_tokens: int = 0  # prefilled for requests that missed an objective
    seconds: float = 0.0


def arrivals(count: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson; prompts and outputs are log-normal around the conversation trace's medians."""
    rng = random.Random(seed)
    now, found = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = min(60_000, max(64, round(rng.lognormvariate(math.log(5_000), 0.9))))
        output = min(2_000, max(4, round(rng.lognormvariate(math.log(250), 0.6))))
        name = rng.choices([name for name, _ in MIX], [share for _, share in MIX])[0]
        found.append(Arrival(now, prompt, output, name))
    return found


def capacity(speed: Speed, prefills: int, decodes: int, sample: list[Arrival]) -> float:
    """Requests per second that the scarcer pool can take within the objectives of the classes."""
    prefill_s = sum(speed.prefill_s(one.prompt) for one in sample) / len(sample)
    tokens = sum(one.output for one in sample) / len(sample)
    tbt_s = min(CLASSES[name].tbt_s for name, _ in MIX)
    batch = (tbt_s - speed.step_s) / speed.step_per_request_s
    return min(prefills / prefill_s, decodes * batch / (tokens * tbt_s))


class Cluster:
    """Runs `arrivals` under one rejection variant."""

    def __init__(self, variant: str, prefills: int, decodes: int, speed: Speed, seed: int) -> None:
        self.speed = speed
        self.prefills = [Prefill() for _ in range(prefills)]
        self.decodes = [Decode(speed, MAX_RUNNING) for _ in range(decodes)]
        self.rejection = rejections[variant]()
        self.policy = placements["mooncake-central-greedy"](Limits(1 << 30), random.Random(seed))
        self.flights: dict[int, Flight] = {}
        self.result = Result()

    def run(self, offered: list[Arrival]) -> Result:
        handovers: list[tuple[float, int]] = []
        pending = iter(enumerate(offered))
        number, arrival = next(pending)
        coming: float = arrival.at
        while True:
            ending = min(range(len(self.decodes)), key=lambda i: self.decodes[i].next_end())
            at_end, at_handover = self.decodes[ending].next_end(), handovers[0][0] if handovers else math.inf
            now = min(coming, at_end, at_handover)
            if now == math.inf:
                self.result.seconds = max(self.result.seconds, offered[-1].at)
                return self.result
            self.result.seconds = now
            if now == coming:
                done = self._arrive(now, number, arrival)
                if done is not None:
                    heapq.heappush(handovers, (done, number))
                number, arrival = next(pending, (0, arrival))
                coming = arrival.at if number else math.inf
            elif now == at_handover:
                self._hand_over(now, heapq.heappop(handovers)[1])
            else:
                self._end(now, self.decodes[ending].leave(now))

    def _arrive(self, now: float, number: int, arrival: Arrival) -> float | None:
        """When its prefill is done; None if it was refused."""
        self.result.offered += 1
        demand = Demand(
            num_tokens=arrival.prompt, max_tokens=2_000, pool_tokens=0, block_size=512, token_bytes=320 << 10,
            service_class=arrival.service_class,
        )  # fmt: skip
        view = View(now, self._candidates(now), LINKS, 1 << 30)
        placement = self.policy.place(now, demand, view, view.none)
        assert isinstance(placement, Placement), placement
        source, target = view.index[placement.prefill], view.index[placement.decode] - len(self.prefills)
        decode, ttft_s = self.decodes[target], placement.estimates["ttft_s"]
        estimate = Estimate(
            service_class=arrival.service_class,
            ttft_s=ttft_s,
            wait_s=placement.estimates["wait_s"],
            step_s=decode.step_s(1),
            step_soon_s=self.speed.decode_step_s(decode.soon(ttft_s) + 1),
            step_alone_s=self.speed.decode_step_s(1),
            decode_s=decode.lengths.mean * decode.step_s(),
        )
        if self.rejection.at_arrival(estimate, 1.0) is not None:
            self.result.counts["refused at arrival"] += 1
            return None
        done = self.prefills[source].add(now, self.speed.prefill_s(arrival.prompt))
        decode.coming += 1
        self.flights[number] = Flight(arrival, done, target)
        self.result.prefill_tokens += arrival.prompt
        return done

    def _candidates(self, now: float) -> list[Candidate]:
        common: dict[str, Any] = {"free_blocks": BLOCKS, "total_blocks": BLOCKS, "prefill": self.speed.prefill}
        for decode in self.decodes:
            decode.advance(now)
        return [
            Candidate(node_id=f"p{i}", roles=("prefill",), wait_s=p.wait_s(now), waiting=p.waiting(now), **common)
            for i, p in enumerate(self.prefills)
        ] + [
            Candidate(
                node_id=f"d{i}", roles=("decode",), running=len(d.running), step_s=d.step_s(1 + d.coming), **common
            )
            for i, d in enumerate(self.decodes)
        ]

    def _hand_over(self, now: float, number: int) -> None:
        flight = self.flights[number]
        decode, name = self.decodes[flight.target], flight.arrival.service_class
        decode.coming -= 1
        decode.advance(now)
        alone_s = self.speed.decode_step_s(1)
        if self.rejection.after_prefill(name, decode.step_s(1), alone_s, 0.0, 1.0) is not None:
            self.result.counts["refused after prefill"] += 1
            self.result.wasted_tokens += flight.arrival.prompt
            del self.flights[number]
            return
        flight.joined = now
        decode.join(now, number, flight.arrival.output)

    def _end(self, now: float, number: int) -> None:
        flight = self.flights.pop(number)
        arrival, wanted = flight.arrival, CLASSES[flight.arrival.service_class]
        ttft_s = flight.prefilled - arrival.at
        tbt_s = (now - flight.joined) / arrival.output
        self.result.counts["finished"] += 1
        if ttft_s <= wanted.ttft_s and tbt_s <= wanted.tbt_s:
            self.result.good += 1
        else:
            self.result.counts["late to the first token" if ttft_s > wanted.ttft_s else "slow"] += 1
            self.result.late_tokens += arrival.prompt
