"""When does a KV CDN pay? Sites that follow the sun, by the bandwidth between them and by what they have in common."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from lab.ablations.common.ablation import Ablation, Estimated
from lab.ablations.common.evidence import UNSHOWN, points, relative, saturated, sign
from lab.ablations.common.metrics import BUSY, COSTS, metric, metrics
from lab.loads.sun import Sun, sun
from lab.simulator.config import SimConfig
from lab.simulator.sites.figures import figures
from lab.simulator.sites.rules import SiteRules
from lab.simulator.sites.sites import Sites

TTFT_S, TBT_S = 10.0, 0.2
REQUESTS = 2400
SITES, NODES = 3, (2, 2)
"""Sites, and prefill and decode nodes of each."""
CACHE, POOL = 300, 600
"""Blocks that a node's arena keeps, and those of its share of its site's pool."""
LOAD = Sun(sites=SITES, rate_s=11.0, day_s=240.0, documents=60, life_s=120.0)
COMMON = (0.2, 0.8)
GBIT_S = (10.0, 25.0, 50.0, 100.0, 200.0)
DISTANCE_S = 0.04
TTL_S = 30.0
"""Of copies: they outlive the pauses between reads of what is popular, and leave long before their document passes."""

ALONE, MOVES, WHOLE = "each site alone", "requests move, no KV", "one site with all nodes"
BASELINES = (ALONE, MOVES, WHOLE)
KV = {"fetch": "KV crosses for each use", "copies": "hot KV is copied"}
MEAN, LINK = "mean TTFT, s", "over the links, GB"


@dataclass(frozen=True, slots=True)
class SitesCase:
    """Sites under one load. `common`: the share of requests about documents that all sites read."""

    label: str
    rules: SiteRules
    config: SimConfig
    common: float
    requests: int
    series: str = ""
    x: float | None = None

    @property
    def source(self) -> str:
        return "generated: sites that follow the sun"

    def settings(self) -> dict[str, object]:
        load = {f"load: {name}": value for name, value in asdict(self._load).items()}
        return self.config.as_dict() | asdict(self.rules) | load

    def as_dict(self) -> dict[str, Any]:
        return {"config": self.config.as_dict(), "rules": asdict(self.rules), "load": asdict(self._load)}

    def brief(self) -> dict[str, Any]:
        default = SimConfig().as_dict()
        changed = {name: value for name, value in self.config.as_dict().items() if value != default[name]}
        return {"config": changed, "rules": asdict(self.rules), "load": asdict(self._load)}

    def simulate(self, seed: int) -> dict[str, Any]:
        rows = sun(seed, self.requests, self._load)
        run = Sites(replace(self.config, seed=seed), self.rules).played(rows)
        return figures(run, TTFT_S, TBT_S)

    @property
    def _load(self) -> Sun:
        return replace(LOAD, common=self.common)


def label(what: str, common: float, gbit_s: float | None = None) -> str:
    link = "" if gbit_s is None else f", {gbit_s:g} Gbit/s"
    return f"{what}{link}, {common:.0%} in common"


def cases(requests: int | None) -> list[SitesCase]:
    count = min(requests or REQUESTS, REQUESTS)
    each = SimConfig(prefill=NODES[0], decode=NODES[1], cache_blocks=CACHE, pool_blocks=POOL)
    all_nodes = replace(each, prefill=SITES * NODES[0], decode=SITES * NODES[1])
    rules = SiteRules(sites=SITES, distance_s=DISTANCE_S, kv="none", ttl_s=TTL_S)
    baselines = {
        ALONE: (replace(rules, moves=False), each),
        MOVES: (rules, each),
        WHOLE: (replace(rules, sites=1), all_nodes),
    }
    made = []
    for common in COMMON:
        made += [
            SitesCase(label(name, common), how, config, common, count) for name, (how, config) in baselines.items()
        ]
        made += [
            SitesCase(
                label(KV[kv], common, gbit_s),
                replace(rules, kv=kv, link_gbit_s=gbit_s),
                each,
                common,
                count,
                f"{KV[kv]}, {common:.0%} in common",
                gbit_s,
            )
            for kv in ("fetch", "copies")
            for gbit_s in GBIT_S
        ]
    return made


def pays_from(values: dict[str, dict[str, Estimated]], name: str, kv: str, common: float) -> float | None:
    """The bandwidth from which on the figure is shown to be lower than if only requests move; None if it is not."""
    baseline, found = label(MOVES, common), None
    for gbit_s in reversed(GBIT_S):
        if sign(values, name, label(KV[kv], common, gbit_s), baseline) != -1:
            break
        found = gbit_s
    return found


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    told = []
    for common in COMMON:
        moves, alone, whole = (label(name, common) for name in (MOVES, ALONE, WHOLE))
        fastest = [label(KV[kv], common, GBIT_S[-1]) for kv in ("fetch", "copies")]
        effective = points(values, "effective", moves, alone)
        told.append(
            f"with {common:.0%} of the requests about common documents, requests that move change mean TTFT by "
            f"{relative(values, MEAN, moves, alone)} and effective requests by {effective} against sites alone; "
            f"fetches of KV {_pays(values, 'fetch', common)}, copies {_pays(values, 'copies', common)}; "
            f"at {GBIT_S[-1]:g} Gbit/s copies change mean TTFT by {relative(values, MEAN, fastest[1], moves)}, and the "
            f"bytes over the links against fetches by {relative(values, LINK, fastest[1], fastest[0])}; one site with "
            "all nodes "
            f"changes it further by {relative(values, MEAN, whole, fastest[1])}"
        )
    return (
        f"When does a KV CDN pay, against requests that move: {'; '.join(told)}. A request moves for one round trip, "
        "while its KV needs one to ask, one to answer, and its bytes: KV pays only where the other site is busy, or "
        f"its nodes have dropped what its pool still has.{saturated(values)}"
    )


def _pays(values: dict[str, dict[str, Estimated]], kv: str, common: float) -> str:
    found = pays_from(values, MEAN, kv, common)
    return f"are not shown to pay ({UNSHOWN})" if found is None else f"pay from {found:g} Gbit/s on"


SITES_ABLATION = Ablation(
    "sites",
    "When does a KV CDN pay?",
    f"{SITES} sites of {NODES[0]}P+{NODES[1]}D, {1000 * DISTANCE_S:g} ms apart, whose load is a daily wave each, "
    "shifted by a third of a day; x = bandwidth of each link in one direction, all of it for KV. Documents of 6k to "
    f"14k tokens and questions about them; documents pass after {LOAD.life_s:g} s, half a day of this load. "
    f"Effective = TTFT <= {TTFT_S:g} s and mean TBT <= {1000 * TBT_S:g} ms.",
    cases,
    metrics(MEAN, "p99 TTFT, s", "effective", "hit rate")
    | BUSY
    | {
        "moved": metric("moved_share"),
        "with KV of other sites": metric("from_sites"),
        LINK: metric("link_bytes", scale=1e-9),
        "copies that left, blocks": metric("copies_expired"),
    }
    | COSTS,
    reading,
    x_name="bandwidth between sites, Gbit/s",
)
