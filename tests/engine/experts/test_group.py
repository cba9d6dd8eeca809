"""ExpertGroup of two ranks without the process of rank 1: which rows are lost, how long a step waits, and who
comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.experts import pulling
from engine.experts.collect import Collector
from engine.experts.group import POLL_S, ExpertGroup, LossRule
from engine.experts.placing.placement import Placement
from engine.experts.plan import Plan
from engine.experts.pulling import Sources
from engine.experts.share import Share
from engine.model.experts.losses import DROP, FAIL, WAIT
from engine.model.model_error import ModelError
from net.rounds.desk import Desk, desk_bytes, new_bell, new_region
from net.rounds.layout import Layout
from net.rounds.silence import ANSWER_S
from net.transfer.common.memory import Region
from tests.engine.experts.test_ranks import OneMove

LAYOUT = Layout(most_rows=8, hidden=16, top_k=1, dtype="float32")
PLAN = Plan((0, 1), 2, 2, 1, hidden=16, expert_size=8, activation="silu", layout=LAYOUT)
EXPERT_OF_0, EXPERT_OF_1 = 0, 1
PLACEMENT = Placement(2, (((EXPERT_OF_0,), (EXPERT_OF_1,)),) * 2)


@pytest.fixture
def keep() -> Iterator[Callable[[Region], Region]]:
    """Closes regions at the end."""
    regions: list[Region] = []

    def kept(region: Region) -> Region:
        regions.append(region)
        return region

    yield kept
    for region in regions:
        region.close()


@pytest.fixture
def new_desk(keep) -> Callable[[], Desk]:
    return lambda: Desk(keep(new_region("desk", LAYOUT)), LAYOUT)


@pytest.fixture
def group_of(keep, new_desk) -> Callable[[LossRule], ExpertGroup]:
    def made(rule: LossRule) -> ExpertGroup:
        own = Desk(keep(Region.private("desk", desk_bytes(LAYOUT))), LAYOUT)
        shares = {rank: Share(keep(Region.private("share", PLAN.share_bytes)), PLAN) for rank in range(2)}
        return ExpertGroup(PLAN, PLACEMENT, [own, new_desk()], shares, keep(new_bell("bell")), rule, {})

    return made


def compute(group: ExpertGroup, layer: int, experts: list[int]) -> None:
    """A layer in which each token has one expert."""
    chosen = torch.tensor(experts)[:, None]
    group.compute(layer, torch.randn(len(experts), 16), chosen, torch.ones(chosen.shape), lambda: None)


@pytest.mark.parametrize("rule", [FAIL, DROP])
def test_losses_of_a_step_of_several_rounds_are_those_of_its_rows(group_of, rule):
    group = group_of(LossRule(rule))
    group.died(1)
    group.begin()
    lost = [1, 7, 8, 12, 18]
    experts = [EXPERT_OF_1 if token in lost else EXPERT_OF_0 for token in range(19)]
    compute(group, 0, experts)
    assert group.take_losses().tokens == dict.fromkeys(lost, 1)
    rows = group.take_losses().by_row([0, 1, 2], [2, 11, 6])  # tokens 0-1, 2-12, 13-18
    assert {row: loss.dropped for row, loss in rows.items()} == {0: 1, 1: 3, 2: 1}
    group.only(torch.arange(100, 119))  # the last layer computes tokens that somebody reads
    compute(group, 1, experts)
    assert group.take_losses().tokens == dict.fromkeys([*lost, *(100 + token for token in lost)], 1)


def test_the_share_of_missing_ranks_is_told_and_lost_experts_count_as_all(group_of, new_desk):
    group = group_of(LossRule(FAIL))
    assert group.lack() == 0.0
    group.died(1)  # no step has noticed it yet
    assert group.lack() == 1.0
    group.arrived(1, new_desk())
    assert group.lack() == 0.0
    both = Placement(2, (((EXPERT_OF_0, EXPERT_OF_1), (EXPERT_OF_1, EXPERT_OF_0)),) * 2)
    group.placement = both
    group.died(1)
    assert group.lack() == 0.5


class Clock:
    """Time that only sleep moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_lost_rank_is_waited_for_once_and_not_in_every_layer(group_of, new_desk, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("engine.experts.group.time", clock)
    group = group_of(LossRule(WAIT, wait_s=60))

    def lost(layer: int) -> int:
        before = group.num_dropped
        compute(group, layer, [EXPERT_OF_0, EXPERT_OF_1])
        return group.num_dropped - before

    group.died(1)
    group.begin()
    end = clock.now + 60
    clock.now += 20  # steps that need no expert of rank 1
    compute(group, 0, [EXPERT_OF_0])
    assert clock.now == end - 40
    assert lost(0) == 1
    assert end <= clock.now <= end + POLL_S
    after = clock.now
    assert lost(1) == 1
    group.begin()
    assert lost(0) == lost(1) == 1
    assert clock.now == after

    group.arrived(1, new_desk())
    group.begin()
    group.died(1)  # another loss is waited for again
    group.begin()
    assert lost(0) == 1
    assert after + 60 <= clock.now <= after + 60 + POLL_S


def test_a_process_that_ended_before_the_next_step_gets_no_place(group_of, new_desk):
    group = group_of(LossRule(FAIL))
    group.died(1)
    group.begin()
    for _ in range(3):
        group.arrived(1, new_desk())
        assert group.missing() == {}
        group.died(1)
        assert list(group.missing()) == ["1"]
    group.begin()
    assert group.masked == {1: "its process has ended"}
    compute(group, 0, [EXPERT_OF_1])  # is not sent to anybody: nothing is waited for
    assert group.take_losses().tokens == {0: 1} and group.num_masked == 1
    group.arrived(1, new_desk())
    group.begin()
    assert not group.masked and group.alive == {0, 1}


def test_a_round_in_which_a_process_ended_is_no_measure_of_rounds(keep, new_desk):
    """Otherwise the moment until its end was noticed would bound the answers of all others."""
    collector, desk = Collector(keep(new_bell("bell")), {1: "its process has ended"}), new_desk()
    desk.ask(0, 0, 1, 1)
    assert collector.wait({1: desk}, [1], work=1) == {1: "its process has ended"}
    collector.silence.begin(0.0, {}, 1)
    assert collector.silence.answer_limit_s == ANSWER_S


def test_experts_that_cannot_be_read_do_not_move(keep, new_desk, caplog, monkeypatch):
    """Rank 1 is elsewhere, and alone has an expert that rank 0 is to get. It lends none, and there is no checkpoint."""

    def unreadable(*given: Any) -> None:
        raise ModelError("no such file")

    monkeypatch.setattr(pulling, "open_weights", unreadable)
    plan = replace(PLAN, remote=1)
    own = Desk(keep(Region.private("desk", desk_bytes(LAYOUT))), LAYOUT)
    shares = {0: Share(keep(Region.private("share", plan.share_bytes)), plan)}
    group = ExpertGroup(plan, PLACEMENT, [own, new_desk()], shares, keep(new_bell("bell")), LossRule(DROP), {})
    assert group.mover is not None
    source: Any = SimpleNamespace(fingerprint="a model")
    group.mover.sources = Sources(plan, source)
    group.balance = OneMove(0, PLACEMENT.with_layer(0, [(EXPERT_OF_1,), (EXPERT_OF_0,)]))
    group.begin()
    assert group.placement is PLACEMENT and group.num_moved == 0 and not group.masked
    assert "it has not joined" in caplog.text and "experts of layer 0 cannot move: no such file" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_rows_of_another_type_are_refused(group_of, dtype):
    """They would be read and written as elements of another size."""
    group = group_of(LossRule(DROP))
    with pytest.raises(ValueError, match=r"are not of float32"):
        group.compute(0, torch.zeros(2, 16, dtype=dtype), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), dict)


def test_the_experts_part_of_decode_steps_is_measured(group_of):
    group = group_of(LossRule(FAIL))
    decode, prompt = SimpleNamespace(token_ids=[7], num_wanted=1), SimpleNamespace(token_ids=[7, 8], num_wanted=0)
    for rows, known in (([prompt], False), ([decode, prompt], False), ([decode], True)):
        with group.step(rows):
            compute(group, 0, [EXPERT_OF_0] * sum(len(row.token_ids) for row in rows))
        assert (group.decode_s > 0) == known
    before = group.decode_s
    with group.step([prompt]):
        compute(group, 0, [EXPERT_OF_0] * 8)
    assert group.decode_s == before == group.state()["decode_step_s"] and group.state()["computed_s"] > before
