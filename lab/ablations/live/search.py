"""One try of a capacity search on real nodes: requests at a rate, judged by objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.ablations.live.loads import Shape, requests, specs
from lab.ablations.live.play import play
from lab.bench.common.latency import tpot_s
from lab.formulas.bisect import Tried
from lab.simulator.result import percentile


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits that `share` of the requests must meet: for the time to first token, and for the mean gap between
    tokens."""

    ttft_s: float
    tbt_s: float
    share: float


def try_rate(urls: Sequence[str], shape: Shape, rate: float, seconds: float, seed: int, wanted: Objectives) -> Tried:
    """Another seed gives other prompts, so no try finds KV of an earlier one. Raises Unreachable, ValueError."""
    rows = requests(replace(shape, rate=rate), seed, seconds)
    outcomes = play(urls, specs(rows, seed)).outcomes
    good = [one for one in outcomes if one.error is None]
    ttft = percentile([one.ttft_s for one in good], wanted.share)
    tbt = percentile([tpot_s(one) for one in good if one.output_tokens > 1], wanted.share)
    failed = len(outcomes) - len(good)
    values = {"ttft_s": ttft, "tbt_s": tbt, "refused": float(failed), "requests": float(len(outcomes))}
    kept = bool(good) and not failed and ttft <= wanted.ttft_s and not tbt > wanted.tbt_s
    return Tried(rate, kept, values)
