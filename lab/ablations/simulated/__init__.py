"""Simulated ablations by name; each file is one figure of a paper or one question of its critics.

Files:
    bandwidth    FAST'25 Fig. 13: the bandwidth above which reuse over the network pays
    blocks       KV transfers: overlapped with computation or not, in 16 or in 8 bits
    breakdown    FAST'25 Fig. 14: one request at a time, by the length of its prompt, with nothing or nearly
                 everything cached
    classes      Orders of the prefill queue
    colocated    Disaggregation against chunked prefill on mixed nodes, fairly: the chunk size is swept, and mixed
                 nodes may part
    effective    FAST'25 Figures 1, 6, 7: requests within their objectives, with Mooncake and with vLLM on the same
                 nodes
    eviction     v3 Table 1 under timing: the effect of an eviction policy on the time to first token
    failure      The cost of a lost node, a slow node and lost gossip
    gossip       The cost of rare and lost gossip for the placement
    learned      A learned choice of the prefill node, with and without its guard, if records do not show which nodes
                 are slow
    overload     v3 Table 3: which requests are refused at twice the load, and where the variants differ
    pool         FAST'25 Fig. 10: one pool of all nodes' memory against a cache per node
    ratio        FAST'25 Fig. 15: the ratio of prefill to decode nodes, 16 in total
    regret       The cost of decentralization: this scheduler against one that knows everything immediately
    roles        Nodes that change their role when the kind of load changes: the gain over a fixed split
    scheduling   FAST'25 Fig. 5 (v3 Fig. 8): the scheduler's part of the gain
    shifts       Loads that are hard for caches: prefixes that are all new, that change together, or that all requests
                 share
    signals      The scheduler's signals in addition to load records, each with and without
    speculative  Speculative decoding with prompts found in the pool, and without
    ssd          The pool's SSD tier: its benefit with little DRAM, and how fast it must be
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lab.ablations.by_model.cache import CACHE
from lab.ablations.by_model.network import NETWORK
from lab.ablations.by_model.split import SPLIT
from lab.ablations.common.ablation import Ablation, Case
from lab.ablations.common.evidence import saturated
from lab.ablations.common.metrics import BUSY, COSTS
from lab.ablations.decoding.answers import ANSWERS
from lab.ablations.decoding.beyond import BEYOND
from lab.ablations.decoding.flexgen import FLEXGEN
from lab.ablations.decoding.moves import MOVES
from lab.ablations.fleet.autoscaling import AUTOSCALING
from lab.ablations.fleet.expert_copies import EXPERT_COPIES
from lab.ablations.fleet.fat_tree import FAT_TREE
from lab.ablations.fleet.prices import PRICES
from lab.ablations.fleet.sessions import SESSIONS_ABLATION
from lab.ablations.fleet.sites import SITES_ABLATION
from lab.ablations.groups.long_prompts import LONG_PROMPTS
from lab.ablations.rivals.table import TABLE as RIVALS
from lab.ablations.simulated.bandwidth import BANDWIDTH
from lab.ablations.simulated.blocks import OVERLAP, QUANTIZED
from lab.ablations.simulated.breakdown import BREAKDOWN
from lab.ablations.simulated.classes import MIXED, ORDERS
from lab.ablations.simulated.colocated import COLOCATED
from lab.ablations.simulated.effective import EFFECTIVE
from lab.ablations.simulated.eviction import EVICTION
from lab.ablations.simulated.failure import FAILURE
from lab.ablations.simulated.gossip import GOSSIP
from lab.ablations.simulated.learned import LEARNED
from lab.ablations.simulated.overload import OVERLOAD
from lab.ablations.simulated.pool import POOL
from lab.ablations.simulated.ratio import RATIO
from lab.ablations.simulated.regret import REGRET
from lab.ablations.simulated.roles import ROLES
from lab.ablations.simulated.scheduling import SCHEDULING
from lab.ablations.simulated.shifts import SHIFTS
from lab.ablations.simulated.signals import SIGNALS
from lab.ablations.simulated.speculative import SPECULATIVE
from lab.ablations.simulated.ssd import TIERS


def _complete(one: Ablation[Case]) -> Ablation[Case]:
    """With the metrics of every ablation, and a sentence that names the saturated cases."""
    return replace(
        one, metrics=one.metrics | BUSY | COSTS, reading=lambda values: one.reading(values) + saturated(values)
    )


ABLATIONS: dict[str, Ablation[Any]] = {
    one.name: _complete(one)
    for one in (
        EFFECTIVE,
        BREAKDOWN,
        SCHEDULING,
        REGRET,
        GOSSIP,
        LEARNED,
        POOL,
        EVICTION,
        TIERS,
        RATIO,
        BANDWIDTH,
        OVERLOAD,
        COLOCATED,
        ANSWERS,
        OVERLAP,
        QUANTIZED,
        SPECULATIVE,
        ORDERS,
        MIXED,
        SHIFTS,
        FAILURE,
        SIGNALS,
        ROLES,
        MOVES,
        AUTOSCALING,
        PRICES,
        EXPERT_COPIES,
        FAT_TREE,
        SESSIONS_ABLATION,
        SPLIT,
        NETWORK,
        CACHE,
        RIVALS,
    )
} | {one.name: one for one in (LONG_PROMPTS, BEYOND, FLEXGEN, SITES_ABLATION)}

WITH_GOALS = [name for name, one in ABLATIONS.items() if one.goals is not None]
"""Ablations that answer a goal of this project."""
