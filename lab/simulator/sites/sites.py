"""Sites: several clusters under one clock, and the choice of the site of each request (sched/placement/sites/)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Self

from lab.loads.trace import TraceRow
from lab.simulator.cluster import job_of
from lab.simulator.config import SimConfig
from lab.simulator.job import Job
from lab.simulator.models.contention import Contention
from lab.simulator.models.loop import Loop
from lab.simulator.models.network import Network
from lab.simulator.models.step_models import StepModel
from lab.simulator.sites.rules import SiteRules
from lab.simulator.sites.site import Site
from sched.placement.sites.choice import nearest


class Sites:
    """One run. `jobs` are all requests in the order of their rows; `moved` counts those that another site computed."""

    def __init__(self, config: SimConfig, rules: SiteRules, model: StepModel | None = None) -> None:
        """config: of each site. Raises what Cluster raises."""
        self.rules, self.loop = rules, Loop()
        # A link is one way of one pair, so its ends are of no other link.
        self.between = Network(self.loop, rules.link_bytes_s, rules.distance_s)
        self.sites = [
            Site(f"site-{i}", replace(config, seed=config.seed + 1000 * i), rules, self.loop, self.between, model)
            for i in range(rules.sites)
        ]
        for site in self.sites:
            site.others = [other for other in self.sites if other is not site]
        # With --contention the nodes of all sites are on one machine, as those of a live test are.
        machine, first = Contention(config.contention, [node for site in self.sites for node in site.nodes]), 0
        for site in self.sites:
            site.contention = machine.of_those_from(first)
            first += len(site.nodes)
        self.jobs: list[Job] = []
        self.moved = 0
        self._by_name = {site.name: site for site in self.sites}

    def played(self, rows: Iterable[TraceRow]) -> Self:
        """Simulate all of it; a row arrives at its site, modulo the number of sites."""
        first: list[list[Job]] = [[] for _ in self.sites]
        for index, row in enumerate(rows):
            job, place = job_of(index, row), row.site % len(self.sites)
            self.jobs.append(job)
            first[place].append(job)
            self.loop.at(job.arrival, self._arrive, self.sites[place], job)
        for site, jobs in zip(self.sites, first, strict=True):
            site.begin(jobs)
        while any(site.unfinished for site in self.sites) and self.loop.step():
            pass
        return self

    def _arrive(self, site: Site, job: Job) -> None:
        chosen = site
        if self.rules.moves:
            best = nearest([other.offer(job, other is site) for other in self.sites], site.name)
            chosen = site if best is None else self._by_name[best.site]
        if chosen is site:
            site.arrived(job)
            return
        self.moved += 1
        site.pass_on(job)
        chosen.take(job)
