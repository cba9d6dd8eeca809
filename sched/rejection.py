"""Who is turned away under load: the variants of the paper (v3 section 7, papers.md section 6). Pure.

    none         nobody, until a queue is full
    stage-load   each stage looks at itself: prefill before it starts, decode when the prompt arrives there, which
                 throws the prefill away
    early        both at arrival, so that no prefill is wasted; but the decode load of then is not that of now, and the
                 two pools swing against each other
    predicted    both at arrival, decode as it is expected to be when the prefill hands over

The load of a pool is what is predicted there over the objective of the request's class: time to first token for
prefill, time per token for decode. Above 1 the request is refused, unless an idle cluster would do no better.
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
    """What a request would meet on the nodes chosen for it."""

    service_class: str
    ttft_s: float
    wait_s: float  # the part of it that others cause
    step_s: float  # decode step if the request joined now
    step_soon_s: float  # if it joins when its prefill is done
    step_alone_s: float  # on an idle decode node
    decode_s: float  # a typical decode, from first to last token


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why, and when to come back."""

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
    """A variant, and the one that refuses nobody. `scale` multiplies the objectives of the classes, `tbt_scale`, if
    given, that of the time per token."""

    forecasts = False  # True: it reads Estimate.step_soon_s, which nodes answer only by message

    def __init__(self, classes: Classes = CLASSES) -> None:
        """`classes`: the objectives in force."""
        self.classes = classes

    def at_arrival(self, estimate: Estimate, scale: float, tbt_scale: float | None = None) -> Refusal | None:
        """Before the prefill."""
        return None

    def after_prefill(
        self,
        service_class: str,
        step_s: float,
        step_alone_s: float,
        decode_s: float,
        scale: float,
        tbt_scale: float | None = None,
    ) -> Refusal | None:
        """When the prompt has come to its decode node; `decode_s`: a typical decode there."""
        return None


class StageLoad(Rejection):
    """The paper's baseline."""

    def at_arrival(self, estimate: Estimate, scale: float, tbt_scale: float | None = None) -> Refusal | None:
        return _late(self.classes[estimate.service_class], estimate, scale)

    def after_prefill(
        self,
        service_class: str,
        step_s: float,
        step_alone_s: float,
        decode_s: float,
        scale: float,
        tbt_scale: float | None = None,
    ) -> Refusal | None:
        return _slow(self.classes[service_class], step_s, step_alone_s, decode_s, tbt_scale or scale)


class Early(Rejection):
    """On the decode load of now."""

    def at_arrival(self, estimate: Estimate, scale: float, tbt_scale: float | None = None) -> Refusal | None:
        e, wanted = estimate, self.classes[estimate.service_class]
        return _late(wanted, e, scale) or _slow(wanted, e.step_s, e.step_alone_s, e.decode_s, tbt_scale or scale)


class Predicted(Rejection):
    """On the decode load of then."""

    forecasts = True

    def at_arrival(self, estimate: Estimate, scale: float, tbt_scale: float | None = None) -> Refusal | None:
        e, wanted = estimate, self.classes[estimate.service_class]
        return _late(wanted, e, scale) or _slow(wanted, e.step_soon_s, e.step_alone_s, e.decode_s, tbt_scale or scale)


rejections: dict[str, type[Rejection]] = {
    "none": Rejection,
    "stage-load": StageLoad,
    "early": Early,
    "predicted": Predicted,
}
"""By the name on the command line; a rival is one class and one entry here."""


def _late(wanted: ServiceClass, estimate: Estimate, scale: float) -> Refusal | None:
    """The queue drains in real time, so the objective is met once so much of it is gone."""
    limit = wanted.ttft_s * scale
    excess = estimate.ttft_s - limit
    if excess <= 0 or estimate.wait_s <= 0:
        return None
    text = f"estimated time to first token {estimate.ttft_s:.2f} s, the objective of {estimate.service_class} is"
    retry_s = bounded_s(min(excess, estimate.wait_s))
    return Refusal(f"{text} {limit:.2f} s", retry_s, estimate.service_class, "ttft", estimate.ttft_s, limit)


def _slow(wanted: ServiceClass, step_s: float, alone_s: float, decode_s: float, scale: float) -> Refusal | None:
    """Running requests end evenly over a typical decode; their share above the objective must be gone."""
    limit = wanted.tbt_s * scale
    if step_s <= limit or step_s <= alone_s * 1.01:
        return None
    text = f"estimated time per token {step_s:.3f} s, the objective of {wanted.name} is {limit:.3f} s"
    share = min(1.0, (step_s - limit) / max(step_s - alone_s, 1e-9))
    return Refusal(text, bounded_s(share * decode_s), wanted.name, "tbt", step_s, limit)


def bounded_s(seconds: float) -> float:
    """Whole seconds for Retry-After."""
    return float(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(seconds))))


class OutputLengths:
    """Tokens that a request makes, as far as those that have ended tell: the paper's fixed decode time."""

    def __init__(self, prior: float = 128.0, memory: float = 64.0) -> None:
        """memory: requests that count."""
        self.mean = prior
        self._memory = memory
        self._count = 0

    def ended(self, tokens: int) -> None:
        self._count += 1
        self.mean += (tokens - self.mean) / min(self._count, self._memory)


def running_soon(
    made: Iterable[int], arriving: int, expected_tokens: float, step_s: float, horizon_s: float, most: int
) -> int:
    """Requests decoding `horizon_s` from now: those running whose expected tokens are not all made by then (`made`: so
    many each), and those whose KV is on its way; these come evenly until then, and the first of them are done by then
    where a decode is shorter than that. A request that has outlived the expectation is taken to go on."""
    steps = horizon_s / step_s if step_s > 0 else 0.0
    stay = sum(tokens >= expected_tokens or tokens + steps < expected_tokens for tokens in made)
    share = min(1.0, expected_tokens / steps) if steps > 0 else 1.0
    return min(most, stay + math.ceil(arriving * share))
