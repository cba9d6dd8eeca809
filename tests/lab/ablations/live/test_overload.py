"""Overload: the figures of what clients of real nodes saw."""

from __future__ import annotations

import pytest

from lab.ablations.live.overload import look, shares
from lab.ablations.live.play import Played
from lab.bench.common.client import Outcome


def test_what_clients_of_real_nodes_saw():
    """Their objectives are those of the nodes, here a tenth of 5 s and 100 ms."""
    good, late = Outcome(ttft_s=0.4, prompt_tokens=100, error=None), Outcome(ttft_s=0.6, prompt_tokens=300, error=None)
    slow = Outcome(ttft_s=0.4, e2e_s=0.44, output_tokens=3, prompt_tokens=200, error=None)
    refused, lost = Outcome(error="status 429: no"), Outcome(error="status 503: no")
    after = Outcome(error="in the stream: estimated time per token 0.2 s, the objective of standard is 0.1 s")
    config = {"slo": "standard:ttft=5,tbt=0.1;batch:ttft=1", "slo_scale": 0.1}
    played = Played([good, good, late, slow, refused, after, lost, lost], 4.0, config)
    assert shares(played, 1000.0) == {
        "good": 2 / 8,
        "refused_part": 2 / 8,
        "refused_after": 1 / 8,
        "late": 1 / 8,
        "slow": 1 / 8,
        "failed": 2 / 8,
        "wasted": 0.3,
        "missed": 0.5,
    }


def test_it_needs_nodes_of_its_own():
    with pytest.raises(ValueError, match="--url"):
        look(["http://x"])
