"""The number of nodes of each role for a load, by formula (reference/scheduling.md 9.1-9.3, 9.6). No simulation.

Prefill is M/G/k with requests in the order of arrival: the wait's mean by Allen-Cunneen, its tail exponential. That
holds for Poisson arrivals and up to nine tenths of the capacity. Decode is a fixed point: the batch of a step depends
on the arrivals during a step, and the step's time on its batch. The running requests of the pool are compound Poisson.
Placement by promised load balances the batches, so each node has its share of the pool's fluctuation. TTFT depends only
on the prefill nodes, the time between tokens only on the decode nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lab.loads.trace import BLOCK_TOKENS
from lab.simulator.models.step_models import StepModel
from sched.waiting import waiting

Vector = npt.NDArray[np.float64]

NODES_MAX = 100_000
"""Maximum nodes of a role: a plan that needs more is refused."""


class Infeasible(ValueError):
    """No number of nodes meets the objectives; the message says why."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits of TTFT and mean time between tokens that `share` of the requests must meet."""

    ttft_s: float
    tbt_s: float
    share: float = 0.9


@dataclass(frozen=True)
class Load:
    """`rate` requests per second, drawn from rows of [requests] vectors: tokens of prompt, answer, cached prefix."""

    rate: float
    prompt: Vector
    answer: Vector
    found: Vector

    def __post_init__(self) -> None:
        if not self.rate > 0 or not len(self.prompt):
            raise ValueError(f"a load needs requests and a positive --rate, got {self.rate}")
        if (self.answer < 1).any() or (self.found < 0).any() or (self.found >= self.prompt).any():
            raise ValueError("an answer needs at least one token, and at least one token of every prompt is computed")

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that are cached."""
        return float(self.found.sum() / self.prompt.sum())


@dataclass(frozen=True, slots=True)
class Split:
    """Nodes by role and their latencies: percentiles at the objective's share, seconds."""

    prefill: int
    decode: int
    ttft_s: float
    tbt_s: float
    cost: float  # per hour

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Plan:
    """`best` has the fewest nodes of each role; `front`: the Pareto-optimal splits within the objectives by cost, TTFT
    and time between tokens, the cheapest first."""

    best: Split
    front: list[Split]
    per_million_output: float
    per_million_tokens: float
    prefill_busy: float  # share of time
    batch: float  # mean requests that a decode node runs


class Prefill:
    """The pool that computes prompts: P(max(W, fetch) + S <= t) over the load's own service times S."""

    def __init__(self, model: StepModel, load: Load) -> None:
        found = each(lambda tokens: model.reused(tokens, BLOCK_TOKENS), load.found)
        self.service: Vector = each(model.prompt_s, load.prompt - found, found)
        fetched_s = model.nic_latency_s + each(model.fetch_bytes, found) / model.nic_bytes_s
        self.fetch: Vector = np.where(found > 0, fetched_s, 0.0)
        self.offered = load.rate * float(self.service.mean())  # busy nodes
        self._residual_s = float(np.mean(self.service**2) / self.service.mean()) / 2

    def kept(self, nodes: int, seconds: float) -> float:
        """Share of requests whose first token arrives within `seconds`; 0 for a pool that cannot keep up."""
        if nodes <= self.offered:
            return 0.0
        waits, mean_s = waiting(nodes, self.offered, self._residual_s)
        left = seconds - self.service
        late = waits * np.exp(-np.maximum(left, 0.0) / mean_s)
        return float(np.mean(np.where(left >= self.fetch, 1 - late, 0.0)))

    def least(self, objective: Objective) -> int:
        """The fewest nodes. Raises Infeasible."""
        alone = float(np.mean(self.service + self.fetch <= objective.ttft_s))
        if alone < objective.share:
            raise Infeasible(
                f"infeasible by service time: with an empty queue {alone:.1%} of prompts are computed within "
                f"{objective.ttft_s:g} s, the objective wants {objective.share:.0%}; raise --ttft-s, split long "
                "prompts over nodes, or find more prefixes"
            )
        return fewest(lambda nodes: self.kept(nodes, objective.ttft_s), objective.share, self.offered, "prefill")


class Decode:
    """The pool that decodes: step times at the load of each node."""

    def __init__(self, model: StepModel, load: Load) -> None:
        self._model, self._load = model, load
        steps = np.maximum(load.answer - 1, 0.0)  # the first token is prefill's
        self._steps = steps
        self.tokens_s = load.rate * float(steps.mean())
        weight = steps / steps.sum() if steps.sum() else steps
        # Mean context of a running request, weighted by its running time.
        self._context = float(weight @ (load.prompt + load.answer / 2))
        self._context_square = float(weight @ (load.prompt + load.answer / 2) ** 2)
        self._tokens = held = each(model.held_tokens, load.prompt + load.answer)  # of KV memory, at the last token
        self._held = float(weight @ held)
        self._held_square = float(weight @ held**2)
        service = Prefill(model, load)
        moved = each(model.handover_bytes, load.prompt) / model.nic_bytes_s
        self._handover = np.maximum(0.0, moved - service.service) + model.nic_latency_s  # streamed by layer

    @cached_property
    def _alone_s(self) -> float:
        return self._model.decode_s(1, round(self._context))

    def batch(self, nodes: int) -> float:
        """Mean requests that a node runs; infinite if it never keeps up."""
        tokens_s = self.tokens_s / nodes
        low, high = 0.0, 4.0 * self._model.max_batch
        if tokens_s * self._step_s(high) >= high:
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if tokens_s * self._step_s(middle) > middle else (low, middle)
        return high

    def _step_s(self, batch: float) -> float:
        base, k = self._model.decode_line(batch)
        return base + batch * k * self._context

    def fits(self, nodes: int, share: float) -> bool:
        """Whether KV and seats suffice in `share` of the time."""
        batch = self.batch(nodes)
        if math.isinf(batch):
            return False
        z = NormalDist().inv_cdf(share)
        held = batch * self._held + z * math.sqrt(batch * self._held_square / nodes)
        return held <= self._model.kv_tokens and batch + z * math.sqrt(batch / nodes) <= self._model.max_batch

    def kept(self, nodes: int, seconds: float, share: float) -> float:
        """Share of requests whose mean time between tokens is within `seconds`; 0 if they do not fit."""
        if not self.tokens_s:
            return 1.0
        if not self.fits(nodes, share):
            return 0.0
        batch = self.batch(nodes)
        _, p, _, d1, k = self._model.decode
        one = (p if p * batch > self._model.read_s(batch) else 0.0) + d1
        # A new request adds itself to the batch.
        mean = self._step_s(batch + 1)
        square = one * one + 2 * one * k * self._context + k * k * self._context_square
        spread = math.sqrt(batch * square / nodes)
        gaps = np.maximum(self._steps, 1.0)
        wanted = (seconds - self._handover / gaps) / (1 + 0.5 / gaps)  # a request waits half a step to join
        inside = _normal((wanted - mean) / max(spread, 1e-12))
        return float(np.mean(np.where(self._steps > 0, inside, 1.0)))

    def least(self, objective: Objective) -> int:
        """The fewest nodes. Raises Infeasible."""
        if not self.tokens_s:
            return 1
        if self._alone_s > objective.tbt_s:
            raise Infeasible(
                f"infeasible by step time: one request alone has a token every {1000 * self._alone_s:.3g} ms, the "
                f"objective is {1000 * objective.tbt_s:.3g} ms; raise --tbt-s or use faster nodes"
            )
        if float(np.mean(self._tokens > self._model.kv_tokens)) > 1 - objective.share:
            raise Infeasible(
                f"infeasible by memory: more than {1 - objective.share:.0%} of the requests do not fit into the "
                f"{self._model.kv_tokens} tokens of KV that a node of {self._model.name} holds"
            )
        return fewest(lambda n: self.kept(n, objective.tbt_s, objective.share), objective.share, 0.0, "decode")


def plan(model: StepModel, load: Load, objective: Objective, prefill_cost: float, decode_cost: float) -> Plan:
    """Costs are per node and hour. Raises Infeasible, ValueError."""
    prefill, decode = Prefill(model, load), Decode(model, load)
    p, d = prefill.least(objective), decode.least(objective)

    def split(p: int, d: int) -> Split:
        ttft = percentile(lambda t: prefill.kept(p, t), objective.share, objective.ttft_s)
        tbt = percentile(lambda t: decode.kept(d, t, objective.share), objective.share, objective.tbt_s)
        return Split(p, d, ttft, tbt, p * prefill_cost + d * decode_cost)

    best = split(p, d)
    more_p, more_d = (range(n, n + max(2, math.ceil(0.25 * n)) + 1) for n in (p, d))
    ttft = {n: split(n, d).ttft_s for n in more_p}
    tbt = {n: split(p, n).tbt_s for n in more_d}
    splits = [Split(i, j, ttft[i], tbt[j], i * prefill_cost + j * decode_cost) for i in more_p for j in more_d]
    hour = 3600 * load.rate
    answer, both = float(load.answer.mean()), float((load.answer + load.prompt).mean())
    return Plan(
        best,
        front(splits),
        1e6 * best.cost / (hour * answer),
        1e6 * best.cost / (hour * both),
        prefill.offered / p,
        decode.batch(d) if decode.tokens_s else 0.0,
    )


def front(splits: Sequence[Split]) -> list[Split]:
    """The Pareto-optimal splits by cost, TTFT and time between tokens, the cheapest first."""

    def beaten(one: Split) -> bool:
        mine = (one.cost, one.ttft_s, one.tbt_s)
        others = [(other.cost, other.ttft_s, other.tbt_s) for other in splits if other is not one]
        return any(all(x <= y for x, y in zip(theirs, mine, strict=True)) and theirs != mine for theirs in others)

    return sorted((one for one in splits if not beaten(one)), key=lambda one: (one.cost, one.ttft_s))


def fewest(kept: Callable[[int], float], share: float, offered: float, role: str) -> int:
    """The smallest number above `offered` for which kept(number) >= share. Raises Infeasible."""
    low = math.floor(offered)  # not enough
    high = low + 1
    while kept(high) < share:
        low, high = high, 2 * high
        if high > NODES_MAX:
            raise Infeasible(f"infeasible: more than {NODES_MAX} {role} nodes would be needed")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(middle) >= share else (middle, high)
    return high


def each(value: Callable[..., float], *tokens: Vector) -> Vector:
    """[requests]: the value for the tokens of each request, whole ones."""
    columns = (one.astype(int).tolist() for one in tokens)
    return np.array([value(*own) for own in zip(*columns, strict=True)], dtype=np.float64)


def percentile(kept: Callable[[float], float], share: float, known: float) -> float:
    """The smallest time at which kept(time) reaches share; `known` is a time that does."""
    low, high = 0.0, known
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if kept(middle) >= share else (middle, high)
    return high


def _normal(z: Vector) -> Vector:
    return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z.tolist()])
