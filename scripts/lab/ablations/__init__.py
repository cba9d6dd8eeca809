"""Ablations by name; each file is one figure of a paper or one question of its critics."""

from __future__ import annotations

from scripts.lab.ablation import Ablation
from scripts.lab.ablations.bandwidth import BANDWIDTH
from scripts.lab.ablations.blocks import OVERLAP, QUANTIZED
from scripts.lab.ablations.breakdown import BREAKDOWN
from scripts.lab.ablations.classes import MIXED, ORDERS
from scripts.lab.ablations.colocated import COLOCATED
from scripts.lab.ablations.effective import EFFECTIVE
from scripts.lab.ablations.eviction import EVICTION
from scripts.lab.ablations.failure import FAILURE
from scripts.lab.ablations.gossip import GOSSIP
from scripts.lab.ablations.learned import LEARNED
from scripts.lab.ablations.overload import OVERLOAD
from scripts.lab.ablations.pool import POOL
from scripts.lab.ablations.ratio import RATIO
from scripts.lab.ablations.regret import REGRET
from scripts.lab.ablations.roles import ROLES
from scripts.lab.ablations.scheduling import SCHEDULING
from scripts.lab.ablations.shifts import SHIFTS
from scripts.lab.ablations.signals import SIGNALS
from scripts.lab.ablations.speculative import SPECULATIVE
from scripts.lab.ablations.ssd import TIERS

ABLATIONS: dict[str, Ablation] = {
    one.name: one
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
        OVERLAP,
        QUANTIZED,
        SPECULATIVE,
        ORDERS,
        MIXED,
        SHIFTS,
        FAILURE,
        SIGNALS,
        ROLES,
    )
}

WITH_GOALS = [name for name, one in ABLATIONS.items() if one.goals is not None]
"""Those that answer a number which this project wants to reach."""
