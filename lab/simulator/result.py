"""Figures of a run: latencies, hits, goodput; independent of the clock and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lab.simulator.cluster import Cluster
from lab.simulator.job import Job
from lab.simulator.making import price
from lab.simulator.models.gossip import Gossip
from lab.simulator.node import Node
from sched.classes import CLASSES, Classes, with_objectives

SHARES = (0.5, 0.9, 0.99)
HOUR_S = 3600


def finished(jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if not math.isnan(job.finished)]


def begun(jobs: Iterable[Job]) -> list[Job]:
    """With a first token."""
    return [job for job in jobs if not math.isnan(job.first_token)]


def time_of(jobs: Sequence[Job]) -> tuple[float, float]:
    """The first arrival, and seconds from it to the last token."""
    begin = min((job.arrival for job in jobs), default=0.0)
    return begin, max((job.finished for job in finished(jobs)), default=begin) - begin


def of_requests(jobs: Sequence[Job], good: Sequence[Job]) -> dict[str, Any]:
    """The figures that follow from the requests alone. good: those that met their objectives."""
    placed = begun(jobs)
    tokens = sum(job.input_tokens for job in placed)
    return {
        "requests": len(jobs),
        "finished": len(finished(jobs)),
        "refused": sum(bool(job.refused) for job in jobs),
        "seconds": time_of(jobs)[1],
        "ttft_s": spread(job.ttft for job in placed),
        "tbt_s": spread(job.tbt for job in finished(jobs)),
        "goodput": len(good) / len(jobs) if jobs else 0.0,
        "token_hit_rate": sum(job.prefix_tokens for job in placed) / tokens if tokens else 0.0,
    }


def figures(
    cluster: Cluster, ttft_slo_s: float | None = None, tbt_slo_s: float | None = None, tail_tbt: bool = False
) -> dict[str, Any]:
    """JSON-ready figures. Goodput counts requests that meet both objectives, the given ones or those of their class.
    The time between tokens is a request's mean, or with `tail_tbt` the mean of its longest tenth, as in FAST'25."""
    jobs, classes = cluster.jobs, with_objectives(cluster.config.slo)
    done, placed = finished(jobs), begun(jobs)
    begin, span = time_of(jobs)
    paid = {node.name: cluster.scaling.paid_s(node.name, begin, begin + span) for node in cluster.nodes}
    good = [job for job in done if kept(job, ttft_slo_s, tbt_slo_s, tail_tbt, classes)]
    return {
        **of_requests(jobs, good),
        "tail_tbt_s": spread(job.tail_tbt for job in done),
        "longest_gap_s": spread(job.longest_gap for job in done if job.answer_tokens > 1),
        "slowdown": spread(job.ttft / cluster.model.prompt_s(job.input_tokens, 0) for job in placed),
        "node_hours": sum(paid.values()) / HOUR_S / _parts(cluster),
        "cost_per_million_tokens": _cost(cluster, paid, good),
        "busy_cost_per_million_tokens": _cost(cluster, {node.name: node.busy_s for node in cluster.nodes}, good),
        "scale_changes": len(cluster.scaling.changes),
        "good_requests_s": len(good) / span if span else 0.0,
        "output_tokens_s": sum(job.answer_tokens for job in done) / span if span else 0.0,
        "pool_fetches": sum(job.source == "pool" for job in placed),
        "fetched_tokens": sum(job.fetched_tokens for job in placed),
        "ssd_tokens": sum(job.ssd_tokens for job in placed),
        "blocks_raised": cluster.pool.raised,
        "blocks_dropped": cluster.pool.dropped,
        "bytes_moved": cluster.network.bytes_moved,
        "retries": sum(job.retries - job.preemptions for job in jobs),
        "preemptions": sum(job.preemptions for job in jobs),
        "pool_model": cluster.pool.kind,
        "gossip_model": cluster.placing.told.kind,
        "digest_answers": _digests(cluster),
        "moves": sum(cluster.migration.begun.values()) - cluster.migration.given_up,
        "move_pause_s": spread(cluster.migration.pauses),
        "role_changes": len(cluster.roles.changes),
        "estimate_mape": _mape(placed),
        "prefill_busy": _prefill_busy(cluster, begin, begin + span, paid),
        "busy": {node.name: node.busy_s / span if span else 0.0 for node in cluster.nodes},
        "wasted_prefill_tokens": sum(
            job.computed - job.prefix_tokens for job in placed if job.refused and math.isnan(job.finished)
        ),
        "by_class": {
            name: {
                "requests": len(own),
                "ttft_s": spread(job.ttft for job in own),
                "goodput": sum(kept(job, ttft_slo_s, tbt_slo_s, tail_tbt, classes) for job in own) / len(own),
            }
            for name in CLASSES
            if (own := [job for job in jobs if job.service_class == name])
        },
    }


def _digests(cluster: Cluster) -> dict[str, float] | None:
    """Shares of the digests' answers about a node that are above and below the truth; None with the stand-in."""
    told = cluster.placing.told
    if not isinstance(told, Gossip):
        return None
    count = max(1, told.accuracy.answers)
    return {"above": told.accuracy.above / count, "below": told.accuracy.below / count}


def _cost(cluster: Cluster, seconds: Mapping[str, float], good: Sequence[Job]) -> float | None:
    """Of a million tokens, prompts and answers, of the requests that met their objectives, if these seconds of each
    node are paid; None if there are none."""
    tokens = sum(job.input_tokens + job.output_tokens for job in good)
    total = sum(price(cluster.config, node) * seconds[node.name] for node in cluster.nodes)
    return 1e6 * total / HOUR_S / tokens if tokens else None


def _prefill_busy(cluster: Cluster, begin: float, end: float, paid: Mapping[str, float]) -> float | None:
    """Share of the time of the nodes with the role prefill in which they compute prompts, also next to decodes; None
    without such time. A node that changes its role counts while it has that role; the prompts that it still finishes
    then can make the sum exceed the time a little."""
    busy_s = sum(node.prompts_s for node in cluster.nodes)
    if cluster.config.role_changes:
        able_s = sum(_prefills_s(cluster, node, begin, end) for node in cluster.nodes)
    else:
        able_s = sum(paid[node.name] for node in cluster.nodes if "prefill" in node.roles)
    return min(1.0, busy_s / able_s) if able_s > 0 else None


def _prefills_s(cluster: Cluster, node: Node, begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which the node has the role prefill, which it may change."""
    total, since, has = 0.0, begin, "prefill" in node.roles
    for at, name, does in cluster.roles.changes:
        if name == node.name:
            total += has * max(0.0, min(at, end) - since)
            since, has = max(since, min(at, end)), "prefill" in does
    return total + has * (end - since)


def _parts(cluster: Cluster) -> int:
    """Nodes of the simulator that are one machine: two where each is a half (rivals/nexus.py)."""
    return 2 if cluster.config.prefill_share else 1


def kept(
    job: Job,
    ttft_slo_s: float | None = None,
    tbt_slo_s: float | None = None,
    tail_tbt: bool = False,
    classes: Classes = CLASSES,
) -> bool:
    """Whether the request met both objectives; an unfinished one did not."""
    if math.isnan(job.finished):
        return False
    wanted = classes[job.service_class]
    late = job.ttft > (wanted.ttft_s if ttft_slo_s is None else ttft_slo_s)
    tbt = job.tail_tbt if tail_tbt else job.tbt
    slow = job.answer_tokens > 1 and tbt > (wanted.tbt_s if tbt_slo_s is None else tbt_slo_s)
    return not late and not slow


def percentile(values: list[float], share: float) -> float:
    """The percentile; NaN without values."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.percentile(known, 100 * share)) if known else math.nan


def spread(samples: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None without values."""
    values = [value for value in samples if not math.isnan(value)]
    if not values:
        return None
    at = np.percentile(values, [100 * share for share in SHARES])
    known = {f"p{round(100 * s)}": float(v) for s, v in zip(SHARES, at, strict=True)}
    return {"mean": float(np.mean(values)), **known, "max": max(values)}


def _mape(jobs: Sequence[Job]) -> float | None:
    errors = [abs(job.estimate_s - job.ttft) / job.ttft for job in jobs if job.ttft > 0 and job.estimate_s >= 0]
    return float(np.mean(errors)) if errors else None
