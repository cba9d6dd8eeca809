"""Additional results of a run, computed from its requests: how long a shock lasts, how evenly work is spread.

A shock is at the middle request, as in lab/loads/changes.py and shapes.py. Windows of `window_s` seconds are taken by
arrival, or by the time at which a node computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from lab.simulator.cluster import Cluster
from lab.simulator.job import Job
from lab.simulator.result import kept
from sched.placement.learned import LearnedPlacement


def recovery(cluster: Cluster, window_s: float = 10.0, share: float = 0.9) -> dict[str, float]:
    """Seconds from the shock to the end of the first window whose token hit rate is `share` of the steady one, which
    is that of the quarter of all requests before the shock. Infinite if there is none.

    `unlimited_recovery_s`: the same for a cache without limits that has every prompt as soon as it arrives: only then
    do requests ask again for prefixes computed since the shock. `caught_up_s`: the time until the share found of what
    such a cache finds is back at `share` of its steady value; `found_in_60_s`: that share in the minute after the
    shock."""
    jobs, shock = cluster.jobs, _shock(cluster.jobs)
    steady = [job for job in jobs[len(jobs) // 4 :] if job.arrival < shock]
    best = findable(cluster)
    windows, at = [], shock
    while at + window_s <= jobs[-1].arrival:
        windows.append([job for job in jobs if at <= job.arrival < at + window_s])
        at += window_s

    def first(rate: Callable[[Sequence[Job]], float]) -> float:
        wanted = share * rate(steady)
        return next((window_s * number for number, own in enumerate(windows, 1) if rate(own) >= wanted), math.inf)

    def unlimited(own: Sequence[Job]) -> float:
        return _hit_rate(own, lambda job: best[job.index])

    def part(own: Sequence[Job]) -> float:
        able = sum(best[job.index] for job in own)
        return sum(job.prefix_tokens for job in own) / able if able else 1.0

    return {
        "recovery_s": first(_hit_rate),
        "steady_hit_rate": _hit_rate(steady),
        "unlimited_recovery_s": first(unlimited),
        "caught_up_s": first(part),
        "found_in_60_s": part([job for job in jobs if shock <= job.arrival < shock + 60.0]),
        "found_steady": part(steady),
    }


def findable(cluster: Cluster) -> dict[int, int]:
    """Job -> leading tokens of its prompt that an earlier prompt shares, in whole blocks, with at least one left to
    compute."""
    seen: set[int] = set()
    found, size = {}, cluster.config.block_tokens
    for job in cluster.jobs:
        run = next((count for count, block in enumerate(job.blocks) if block not in seen), len(job.blocks))
        found[job.index] = min(run, (job.input_tokens - 1) // size) * size
        seen.update(job.blocks[: job.input_tokens // size])
    return found


def imbalance(cluster: Cluster, after_s: float = 2.0, window_s: float = 10.0) -> dict[str, float]:
    """The load of the busiest prefill node over their mean, in the worst window that begins at least `after_s` after
    the shock. Assumes that nodes compute prompts one after the other (fcfs)."""
    names = [node.name for node in cluster.nodes if "prefill" in node.roles]
    jobs = [job for job in cluster.jobs if not math.isnan(job.prefilled)]
    at, last = _shock(cluster.jobs) + after_s, cluster.jobs[-1].arrival
    worst = math.nan
    while at + window_s <= last:
        busy = dict.fromkeys(names, 0.0)
        for job in jobs:
            busy[job.prefill] += max(0.0, min(job.prefilled, at + window_s) - max(job.begun, at))
        if total := sum(busy.values()):
            worst = max(max(busy.values()) * len(names) / total, 0.0 if math.isnan(worst) else worst)
        at += window_s
    return {"worst_imbalance": worst}


def placed_imbalance(cluster: Cluster, after_s: float = 2.0) -> dict[str, float]:
    """The same for the work placed on each node, over the whole time from `after_s` after the shock to the last
    arrival."""
    names = [node.name for node in cluster.nodes if "prefill" in node.roles]
    since, until = _shock(cluster.jobs) + after_s, cluster.jobs[-1].arrival
    busy = dict.fromkeys(names, 0.0)
    for job in cluster.jobs:
        if not math.isnan(job.prefilled):
            busy[job.prefill] += max(0.0, min(job.prefilled, until) - max(job.begun, since))
    total = sum(busy.values())
    return {"imbalance": max(busy.values()) * len(names) / total if total else math.nan}


def answer_times(cluster: Cluster) -> dict[str, float]:
    """Mean seconds from arrival to the last token."""
    done = [job.finished - job.arrival for job in cluster.jobs if not math.isnan(job.finished)]
    return {"answer_s": sum(done) / len(done) if done else math.nan}


class Back:
    """After a fault at `at_s`: seconds until the end of the last window in which less than `share` of the requests were
    good: a first token within ttft_s and no gap between tokens above gap_s. 0 if there is no such window."""

    def __init__(self, at_s: float, share: float = 0.95, ttft_s: float = 30.0, gap_s: float = 2.0) -> None:
        self.at_s, self.share, self.ttft_s, self.gap_s = at_s, share, ttft_s, gap_s

    def __call__(self, cluster: Cluster, window_s: float = 5.0) -> dict[str, float]:
        jobs, at, back = cluster.jobs, self.at_s, 0.0
        while at < jobs[-1].arrival:
            here = [job for job in jobs if at <= job.arrival < at + window_s]
            at += window_s
            if here and sum(map(self._good, here)) < self.share * len(here):
                back = at - self.at_s
        hurt = sum(not self._good(job) for job in jobs)
        return {"back_after_s": back, "hurt": float(hurt)}

    def _good(self, job: Job) -> bool:
        return job.ttft <= self.ttft_s and job.longest_gap <= self.gap_s and not math.isnan(job.finished)


class Effective:
    """Share of requests with a first token within ttft_s and a TBT, the mean of the longest tenth of the gaps, within
    each of the limits; and the prefill time per request: the time of the computed chunks, alone on a node."""

    def __init__(self, limits_s: Sequence[float], ttft_s: float = 30.0) -> None:
        self._limits, self._ttft_s = limits_s, ttft_s

    def __call__(self, cluster: Cluster) -> dict[str, float]:
        jobs, model = cluster.jobs, cluster.model
        shares = {
            f"effective_{1000 * limit:.0f}": sum(kept(job, self._ttft_s, limit, True) for job in jobs) / len(jobs)
            for limit in self._limits
        }
        seconds = sum(model.prompt_s(job.input_tokens - job.prefix_tokens, job.prefix_tokens) for job in jobs)
        return shares | {"prefill_s": seconds / len(jobs)}


def last_request(cluster: Cluster) -> dict[str, float]:
    """Figures of the last request."""
    last = cluster.jobs[-1]
    return {"last_ttft_s": last.ttft, "last_total_s": last.finished - last.arrival}


class Copies:
    """The number of nodes that have the blocks of these popularity ranks at the end."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def __call__(self, cluster: Cluster) -> dict[str, float]:
        wanted = Counter(block for job in cluster.jobs for block in job.blocks)
        hottest = [block for block, _ in wanted.most_common(max(self._ranks))]
        holders = [sum(block in node.arena.blocks for node in cluster.nodes) for block in hottest]
        return {f"copies_{rank}": float(holders[rank - 1]) for rank in self._ranks if rank <= len(holders)}


def guard(cluster: Cluster) -> dict[str, float]:
    """The behaviour of a learned placement: how far it departed from the rule at most, and how often;
    of all acceptors."""
    policies = [one for one in cluster.placing.acceptors.learning.values() if isinstance(one, LearnedPlacement)]
    if not policies:
        return {}
    decided = max(1, sum(one.decided for one in policies))
    return {
        "worst_estimate_ratio": max(one.worst for one in policies),
        "departed": sum(one.departed for one in policies) / decided,
        "predictor_error": sum(one.decided * one.error.mean for one in policies) / decided,
        "rule_error": sum(one.decided * one.rule_error.mean for one in policies) / decided,
    }


def swing(cluster: Cluster, window_s: float = 10.0) -> dict[str, float]:
    """How much the stages alternate: the correlation over windows between requests in prefill and requests in decode,
    and the share of the time in which decode had less than half of its mean."""
    jobs = [job for job in cluster.jobs if not math.isnan(job.sent)]
    times = np.arange(cluster.jobs[0].arrival + window_s, cluster.jobs[-1].arrival, window_s / 4)
    prefill = _inside(times, jobs, lambda job: job.sent, lambda job: job.prefilled)
    decode = _inside(times, jobs, lambda job: job.joined, lambda job: job.finished)
    if len(times) < 3 or not prefill.std() or not decode.std():
        return {"stage_correlation": math.nan, "decode_idle_share": math.nan}
    return {
        "stage_correlation": float(np.corrcoef(prefill, decode)[0, 1]),
        "decode_idle_share": float(np.mean(decode < decode.mean() / 2)),
    }


def _inside(
    times: np.ndarray[tuple[int], np.dtype[np.float64]],
    jobs: Sequence[Job],
    begin: Callable[[Job], float],
    end: Callable[[Job], float],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """[times]: how many jobs are between begin and end."""
    pairs = [(begin(job), end(job)) for job in jobs if not math.isnan(begin(job)) and not math.isnan(end(job))]
    begun, ended = (np.sort(np.array([pair[side] for pair in pairs], dtype=np.float64)) for side in (0, 1))
    inside = np.searchsorted(begun, times) - np.searchsorted(ended, times)
    return inside.astype(np.float64)


def _shock(jobs: Sequence[Job]) -> float:
    return jobs[len(jobs) // 2].arrival


def _hit_rate(jobs: Sequence[Job], found: Callable[[Job], float] = lambda job: job.prefix_tokens) -> float:
    tokens = sum(job.input_tokens for job in jobs)
    return sum(map(found, jobs)) / tokens if tokens else 0.0
