"""Figures of a run with several sites."""

from __future__ import annotations

import math
from typing import Any

from lab.simulator.making import price
from lab.simulator.result import HOUR_S, begun, finished, kept, of_requests, time_of
from lab.simulator.sites.sites import Sites
from sched.classes import with_objectives


def figures(run: Sites, ttft_slo_s: float, tbt_slo_s: float) -> dict[str, Any]:
    """JSON-ready, in the names of lab/simulator/result.py where there is one. Links count KV only."""
    jobs, config = run.jobs, run.sites[0].config
    classes = with_objectives(config.slo)
    _, span = time_of(jobs)
    good = [job for job in finished(jobs) if kept(job, ttft_slo_s, tbt_slo_s, False, classes)]
    good_tokens = sum(job.input_tokens + job.output_tokens for job in good)
    prefills = [node for site in run.sites for node in site.nodes if "prefill" in node.roles]
    hours = sum(len(site.nodes) for site in run.sites) * span / HOUR_S
    cost = sum(price(config, node) for site in run.sites for node in site.nodes) * span / HOUR_S
    return {
        **of_requests(jobs, good),
        "node_hours": hours,
        "cost_per_million_tokens": 1e6 * cost / good_tokens if good_tokens else math.nan,
        "prefill_busy": sum(node.busy_s for node in prefills) / (len(prefills) * span) if span else 0.0,
        "moved_share": run.moved / len(jobs) if jobs else 0.0,
        "from_sites": sum(job.source == "site" for job in begun(jobs)) / len(jobs) if jobs else 0.0,
        "link_bytes": sum(site.far_bytes for site in run.sites),
        "copies_expired": sum(site.expired for site in run.sites),
    }
