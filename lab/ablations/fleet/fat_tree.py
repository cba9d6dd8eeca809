"""NetKV on a fat tree of 64 GPUs: what the choice of the decode node by distance and load of the links saves."""

from __future__ import annotations

from statistics import fmean

from lab.ablations.common.ablation import Ablation, Case, Estimated, Workload
from lab.ablations.common.evidence import points, relative
from lab.ablations.common.metrics import metric, metrics
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from sched.placement.links import distance

REQUESTS = 4000
TTFT_S, TBT_S = 5.0, 0.1
DECODE = "mean time to decode, s"
TREES = {"8x2x2": "full bisection", "8x2x2:2:4": "2:1 above racks, 4:1 above pods"}
GBIT = (25, 100)
LOADS = {"conversation": ("conversation", 6.0), "agents": ("agents", 3.0)}
"""Load -> (trace or generator, how much faster than recorded)."""

CHOICES: dict[str, dict[str, object]] = {
    "in turn": {"placement": "decode-in-turn"},
    "by load": {"placement": "decode-by-load"},
    "netkv": {"placement": "netkv"},
    "mooncake without places": {"known_places": False},
    "mooncake": {},
}
FLOWS: dict[str, dict[str, object]] = {"fair flows": {}, "flows by deadline": {"flow_order": "deadline"}}
POOL_BLOCKS = 6000


def waits(cluster: Cluster) -> dict[str, float]:
    """Mean seconds from the arrival of a request until it decodes, from its prefill until then, and the share of
    hand-overs inside a host."""
    jobs = [job for job in cluster.jobs if job.joined == job.joined]
    places = cluster.network.places
    return {
        "to_decode_s": fmean(job.joined - job.arrival for job in jobs),
        "handover_s": fmean(max(0.0, job.joined - job.prefilled) for job in jobs),
        "same_host": fmean(distance(places[job.prefill], places[job.decode]) == 0 for job in jobs),
    }


def label(choice: str, load: str, tree: str, gbit: int) -> str:
    return f"{choice}, {load}, {TREES[tree]}, {gbit} Gbit/s"


def flow_label(flows: str, load: str) -> str:
    return f"{flows}, with a pool, {load}"


def cases(requests: int | None) -> list[Case]:
    def case(name: str, load: str, tree: str, gbit: int, **more: object) -> Case:
        config = SimConfig(
            model_geometry="Llama-3-8B",
            hardware="a800",
            prefill=32,
            decode=32,
            nic_gbit_s=float(gbit),
            kv_overlap="none",
            fat_tree=tree,
            **more,  # type: ignore[arg-type]
        )
        trace, speed = LOADS[load]
        work = Workload(trace, min(requests or REQUESTS, REQUESTS), speed)
        return Case(name, config, work, TTFT_S, TBT_S, look=(waits,))

    narrow = list(TREES)[-1]
    return [
        case(label(choice, load, tree, gbit), load, tree, gbit, **more)
        for load in LOADS
        for tree in TREES
        for gbit in GBIT
        for choice, more in CHOICES.items()
    ] + [
        case(flow_label(flows, load), load, narrow, GBIT[0], pool_blocks=POOL_BLOCKS, **more)
        for load in LOADS
        for flows, more in FLOWS.items()
    ]


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    said = []
    for load in LOADS:
        for tree, name in TREES.items():
            for gbit in GBIT:
                turn, by_load, netkv, blind, ours = (label(choice, load, tree, gbit) for choice in CHOICES)
                said.append(
                    f"{load}, {name}, {gbit} Gbit/s: NetKV {relative(values, DECODE, netkv, turn)} against decode "
                    f"nodes in turn and {relative(values, DECODE, netkv, by_load)} against by load, effective requests "
                    f"{points(values, 'effective', netkv, by_load)}; the default with places "
                    f"{relative(values, DECODE, ours, blind)} against the default without, NetKV against the default "
                    f"{relative(values, DECODE, netkv, ours)}"
                )
    fair, ordered = FLOWS
    flows = [
        f"{load}: {relative(values, DECODE, flow_label(ordered, load), flow_label(fair, load))}, mean TTFT "
        f"{relative(values, 'mean TTFT, s', flow_label(ordered, load), flow_label(fair, load))}"
        for load in LOADS
    ]
    return (
        f"Mean time until a request decodes. {'. '.join(said)}. The paper prints at best -21.2 % against round-robin, "
        "-17.6 % against a tuned scheduler by cache and load, and 20.1 points more requests within their objectives. "
        f"Flows by deadline against fair ones, default placement with a pool: {'; '.join(flows)}."
    )


FAT_TREE = Ablation(
    "fat-tree",
    "What does placement save that knows distance and load of the links?",
    "Llama-3-8B on 64 A800 in a fat tree: one GPU and one NIC per node, 8 nodes per host (NVLink inside), 2 hosts per "
    "rack, 2 racks per pod, 2 pods; 32P+32D, spread evenly. KV moves after the prefill, as in the paper. All systems "
    "place prompts by Algorithm 1; a request's first token comes from the prefill node here and from the decode node "
    f"in the paper, so its TTFT is our time to decode. effective = TTFT <= {TTFT_S:g} s and mean TBT <= "
    f"{1000 * TBT_S:g} ms. The conversation trace {LOADS['conversation'][1]:g} times and generated agents "
    f"{LOADS['agents'][1]:g} times as fast.",
    cases,
    {DECODE: metric("to_decode_s")}
    | metrics("mean TTFT, s", "p99 TTFT, s", "effective", "mean TPOT, ms")
    | {"mean hand-over, s": metric("handover_s"), "same host": metric("same_host")},
    reading,
    paper_source="NetKV (arXiv 2606.03910), abstract: at most -21.2 % mean TTFT against round-robin, -17.6 % against "
    "cache and load, on its own tree of 64 GPUs",
)
