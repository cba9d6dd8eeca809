"""The products of a rank: all slots in one grouped product, as each expert by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.experts import work
from engine.experts.plan import Plan
from engine.experts.share import MATRICES, Share, kinds
from engine.experts.work import Work
from net.rounds.desk import Desk, desk_bytes
from net.rounds.layout import Layout
from net.transfer.common.memory import Region

SLOTS = 5
TOLERANCE = {"float32": {"rtol": 1e-5, "atol": 1e-5}, "bfloat16": {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture
def share_of() -> Iterator[Callable[..., tuple[Share, Plan]]]:
    regions: list[Region] = []

    def made(hidden: int, size: int, dtype: str, biased: bool) -> tuple[Share, Plan]:
        layout = Layout(most_rows=16, hidden=hidden, top_k=2, dtype=dtype)
        clamped = {"activation": "clamped", "gate_limit": 7.0} if biased else {"activation": "silu"}
        plan = Plan((0, 1), SLOTS, 1, SLOTS, hidden, size, layout=layout, biased=biased, **clamped)
        regions.append(Region.private("share", plan.share_bytes))
        share = Share(regions[-1], plan)
        for layer in range(2):
            for slot in range(SLOTS):
                for kind in kinds(plan):
                    shape = (hidden, size) if kind.startswith(MATRICES[2]) else (size, hidden)
                    share.put(layer, slot, kind, torch.randn(shape[:1] if kind.endswith("bias") else shape) / 4)
        return share, plan

    yield made
    for region in regions:
        region.close()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("hidden", "size"), [(32, 16), (32, 12), (30, 16), (32, 7)])
@pytest.mark.parametrize("counts", [[3, 0, 1, 5, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]])
def test_all_slots_at_once_are_as_each_by_itself(share_of, dtype, biased, hidden, size, counts):
    """Also where rows are not multiples of 16 bytes."""
    torch.manual_seed(1)
    share, _ = share_of(hidden, size, dtype, biased)
    x = torch.randn(sum(counts), hidden).to(getattr(torch, dtype))
    found = share.experts(1, x, torch.tensor(counts).cumsum(0).to(torch.int32))
    parts = [share.expert(1, slot, part) for slot, part in enumerate(x.split(counts))]
    torch.testing.assert_close(found, torch.cat(parts), **TOLERANCE[dtype])


def by_hand(share: Share, x: Tensor, rows: Tensor, slots: Tensor, weights: Tensor, of: int) -> Tensor:
    out = torch.zeros(of, x.shape[1])
    for row, slot, weight in zip(rows.tolist(), slots.tolist(), weights.tolist(), strict=True):
        out[row] += weight * share.expert(0, slot, x[row : row + 1])[0]
    return out


@pytest.mark.parametrize("most", [1, 3, 7, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_message_is_computed_in_parts(share_of, monkeypatch, most, seed):
    """Their ends lie anywhere, also within an expert."""
    monkeypatch.setattr(work, "MOST_PAIRS", most)
    torch.manual_seed(seed)
    share, plan = share_of(32, 16, "float32", False)
    region = Region.private("desk", desk_bytes(plan.layout))
    rank = Work(Desk(region, plan.layout), 0, {0: share})
    x, rows = torch.randn(9, 32), torch.arange(9).repeat(2)
    slots, weights = torch.randint(SLOTS, (18,)), torch.rand(18)
    rank._pair_rows[:18], rank._pair_slots[:18], rank._pair_weights[:18] = rows, slots, weights
    rank._rows[:9] = x
    rank.compute(0, 9, 18)
    torch.testing.assert_close(rank._answer[:9], by_hand(share, x, rows, slots, weights, 9), rtol=1e-4, atol=1e-5)
    del rank
    region.close()
