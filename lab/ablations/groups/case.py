"""A case: one way to compute long prompts on some nodes, together with short prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from lab.simulator.models.prefill_group import Beside, PrefillGroup
from lab.simulator.models.step_models import LLAMA3_70B, PAPER_NODE

TOKENS = 500_000
"""Of the long prompts of a run, one after the other, at least two; a short run has one."""


HOUR_S = 3600

OVERLOADED = 0.1
"""Share of the short prompts that have no token at the end of a run, from which the run tells no TTFT of them."""


@dataclass(frozen=True, slots=True)
class GroupCase:
    """Nodes as in the paper: LLaMA3-70B on 8 A800 each (lab/simulator/models/step_models.py)."""

    label: str
    way: str  # of lab/simulator/models/prefill_group.py
    nodes: int
    tokens: int  # of a long prompt
    load: float  # of short prompts: the share of the nodes' time
    shorts: int | None = None  # a short run, in which at most this number arrives
    gbit_s: float | None = None  # of a node's NICs; None: as measured in the paper

    @property
    def series(self) -> str:
        return f"{self.way}, {self.tokens // 1024}k"

    @property
    def x(self) -> float | None:
        """The curves are of the NICs of the paper."""
        return float(self.nodes) if self.gbit_s is None else None

    @property
    def source(self) -> str:
        return "generated: long prompts one after the other, short ones at random times"

    def settings(self) -> dict[str, object]:
        return {"model": PAPER_NODE.name, "load of short prompts": self.load}

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("way", "nodes", "tokens", "load", "gbit_s")}

    def brief(self) -> dict[str, Any]:
        return self.as_dict()

    def simulate(self, seed: int) -> dict[str, Any]:
        """Three runs: long prompts alone; with short ones at `load`; and every node always has some."""
        model = PAPER_NODE if self.gbit_s is None else replace(PAPER_NODE, nic_bytes_s=self.gbit_s * 1e9 / 8)
        limit = {} if self.shorts is None else {"limit": self.shorts}
        alone, beside, full = (
            PrefillGroup(model, LLAMA3_70B, self.way, self.nodes, self.tokens, Beside(load, **limit))
            for load in (0.0, self.load, None)
        )
        for one in (alone, beside, full):
            one.play(max(2, TOKENS // self.tokens) if self.shorts is None else 1, seed)
        shorts = beside.short_ttft_s if beside.open_share < OVERLOADED else []
        prompt_tokens = len(full.ttft_s) * self.tokens + len(full.short_ttft_s) * full.beside.mean
        return {
            "requests": len(beside.ttft_s) + beside.arrived,
            "finished": len(beside.ttft_s) + len(beside.short_ttft_s),
            "refused": 0,
            "alone_s": fmean(alone.ttft_s),
            "waiting_alone": alone.waiting,
            "idle_alone": 1 - alone.computing - alone.waiting,
            "beside_s": fmean(beside.ttft_s),
            "short_s": fmean(shorts) if shorts else math.nan,
            "short_p99_s": float(np.percentile(shorts, 99)) if shorts else math.nan,
            "open": beside.open_share,
            "full_s": fmean(full.ttft_s),
            "shorts_per_s": len(full.short_ttft_s) / full.seconds,
            "computing": full.computing,
            "node_hours": self.nodes * full.seconds / HOUR_S,
            "cost": 1e6 * self.nodes * full.seconds / HOUR_S / prompt_tokens,
            "received_gb": alone.received_bytes / 1e9,
        }
