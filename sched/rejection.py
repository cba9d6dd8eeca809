"""Decides which requests are refused under load: the variants of the paper (v3 section 7, papers.md section 6). Pure.

    none         refuses no request until a queue is full
    stage-load   each stage checks its own load: prefill before it starts, decode when the prompt arrives there, which
                 wastes the prefill of a refused request
    early        checks both at arrival, so that no prefill is wasted; but the decode load changes until the prompt gets
                 there, and the loads of the two pools oscillate
    predicted    checks both at arrival, with the decode load predicted for the end of the prefill

The load of a pool is the predicted latency over the objective of the request's class: time to first token for prefill,
time per token for decode. A request is refused if the load exceeds 1, unless an idle cluster would be no faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sched.admission import MAX_RETRY_S, MIN_RETRY_S
from sched.classes import CLASSES, Classes, ServiceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated latencies of a request on the chosen nodes."""

    service_class: str
    ttft_s: float
    wait_s: float  # the part of ttft_s caused by other requests
    step_s: float  # decode step if the request joined now
    step_soon_s: float  # decode step if the request joins when its prefill is done
    step_alone_s: float  # on an idle decode node
    decode_s: float  # a typical decode, from first to last token


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for a refusal, and when to retry."""

    reason: str
    retry_after_s: float
    service_class: str
    objective: str  # "ttft" or "tbt"
    estimated_s: float
    limit_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class Rejection:
    """Base class of the variants; it refuses no request."""

    forecasts = False  # whether it uses Estimate.step_soon_s, which nodes report only in messages

    def __init__(self, classes: Classes = CLASSES) -> None:
        """`classes`: the objectives in force, scaled."""
        self.classes = classes

    def at_arrival(self, estimate: Estimate) -> Refusal | None:
        """Before the prefill."""
        return None

    def after_prefill(self, service_class: str, step_s: float, alone_s: float, decode_s: float) -> Refusal | None:
        """When the prompt has arrived at its decode node. Seconds of a step with it, of a step with it alone, and of a
        typical decode there."""
        return None


class StageLoad(Rejection):
    """The paper's baseline."""

    def at_arrival(self, estimate: Estimate) -> Refusal | None:
        return _late(self.classes[estimate.service_class], estimate)

    def after_prefill(self, service_class: str, step_s: float, alone_s: float, decode_s: float) -> Refusal | None:
        return _slow(self.classes[service_class], step_s, alone_s, decode_s)


class Early(Rejection):
    """Uses the present decode load."""

    def at_arrival(self, estimate: Estimate) -> Refusal | None:
        e, wanted = estimate, self.classes[estimate.service_class]
        return _late(wanted, e) or _slow(wanted, e.step_s, e.step_alone_s, e.decode_s)


class Predicted(Rejection):
    """Uses the decode load predicted for the end of the prefill."""

    forecasts = True

    def at_arrival(self, estimate: Estimate) -> Refusal | None:
        e, wanted = estimate, self.classes[estimate.service_class]
        return _late(wanted, e) or _slow(wanted, e.step_soon_s, e.step_alone_s, e.decode_s)


METHODS = ("at_arrival", "after_prefill")
"""Of a variant in a user's file, which inherits from Rejection."""

rejections: dict[str, type[Rejection]] = {
    "none": Rejection,
    "stage-load": StageLoad,
    "early": Early,
    "predicted": Predicted,
}
"""Variants by their names on the command line. A new variant is one class and one entry here."""


def _late(wanted: ServiceClass, estimate: Estimate) -> Refusal | None:
    """Refuses if the time to first token misses the objective. The queue drains in real time, so the excess is the time
    until a retry."""
    limit = wanted.ttft_s
    excess = estimate.ttft_s - limit
    if excess <= 0 or estimate.wait_s <= 0:
        return None
    text = f"estimated time to first token {estimate.ttft_s:.2f} s, the objective of {estimate.service_class} is"
    retry_s = bounded_s(min(excess, estimate.wait_s))
    return Refusal(f"{text} {limit:.2f} s", retry_s, estimate.service_class, "ttft", estimate.ttft_s, limit)


def _slow(wanted: ServiceClass, step_s: float, alone_s: float, decode_s: float) -> Refusal | None:
    """Refuses if the step misses the objective. Running requests end evenly over a typical decode, so the retry time is
    the share of it by which the step exceeds the objective."""
    limit = wanted.tbt_s
    if step_s <= limit or step_s <= alone_s * 1.01:
        return None
    text = f"estimated time per token {step_s:.3f} s, the objective of {wanted.name} is {limit:.3f} s"
    share = min(1.0, (step_s - limit) / max(step_s - alone_s, 1e-9))
    return Refusal(text, bounded_s(share * decode_s), wanted.name, "tbt", step_s, limit)


def bounded_s(seconds: float) -> float:
    """Whole seconds for Retry-After."""
    return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds))))


class OutputLengths:
    """Mean output tokens of ended requests, as a forecast for running ones: the paper's fixed decode time."""

    def __init__(self, prior: float = 128.0, memory: float = 64.0) -> None:
        """prior: initial mean, tokens; memory: number of requests in the moving mean."""
        self.mean = prior
        self._memory = memory
        self._count = 0

    def ended(self, tokens: int) -> None:
        self._count += 1
        self.mean += (tokens - self.mean) / min(self._count, self._memory)


def running_soon(
    made: Iterable[int], arriving: int, expected_tokens: float, step_s: float, horizon_s: float, most: int
) -> int:
    """Number of requests that will decode in `horizon_s` seconds. It counts running requests (`made`: output tokens of
    each) whose expected tokens will not be complete by then, and `arriving` requests, whose KV arrives evenly until
    then; if a decode is shorter than the horizon, the first of these have ended. A request that has already exceeded
    the expected length is assumed to continue. At most `most`."""
    steps = horizon_s / step_s if step_s > 0 else 0.0
    stay = sum(tokens >= expected_tokens or tokens + steps < expected_tokens for tokens in made)
    share = min(1.0, expected_tokens / steps) if steps > 0 else 1.0
    return min(most, stay + math.ceil(arriving * share))
