"""The whole rule in virtual time: ranks that are killed, stopped, hang, are cut off, come back and move experts, all of
it by seed.

The group, its messages and its products are the real ones. Time, and with it the ranks, only moves while rank 0 waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.experts.group import WAIT_S, ExpertGroup, LossRule
from engine.experts.placing.placement import Placement, first_placement
from engine.experts.plan import Plan
from engine.experts.share import MATRICES, Share
from engine.experts.work import Work
from engine.model.experts.losses import DROP, FAIL, WAIT
from net.rounds.desk import Desk, desk_bytes, new_bell, new_region
from net.rounds.layout import Layout
from net.rounds.silence import ANSWER_S, ANSWERS, LEAST_ANSWER_S, MOST_S
from net.transfer.common.memory import Region

RANKS, EXPERTS, HIDDEN, SIZE, TOP_K = 4, 8, 16, 8, 2
LAYOUT = Layout(most_rows=32, hidden=HIDDEN, top_k=TOP_K, dtype="float32")
TICK_S = 0.005
LONGEST_S = 0.12
"""Of a rank's work on one message."""
KINDS = ("dead", "stopped", "hangs", "cut")


@dataclass
class Rank:
    """A process that is not there: it beats and answers in virtual time."""

    desk: Desk
    work: Work
    state: str = "runs"  # or one of KINDS
    answers_at: float | None = None
    held: int = 0  # beats that have not come yet


class World:
    """The clock, the ranks, and what rank 0 sees of them."""

    def __init__(self, seed: int, keep: Callable[[Region], Region], replicas: int, rule: str, added: int) -> None:
        self.rng, self.now, self._keep = random.Random(seed), 100.0, keep
        copies = replicas * EXPERTS
        sizes = EXPERTS, RANKS + added, copies // RANKS, HIDDEN, SIZE
        self.plan = Plan((0, 1), *sizes, "silu", LAYOUT, remote=added, added=added)
        placement = first_placement(2, EXPERTS, RANKS, copies, replicas, added)
        self.shares = {
            rank: Share(keep(Region.private("share", self.plan.share_bytes)), self.plan)
            for rank in range(self.plan.ranks)
        }
        shapes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
        self.weights = {
            (layer, expert, kind): torch.randn(shapes[kind])
            for layer in range(2)
            for expert in range(EXPERTS)
            for kind in MATRICES
        }
        for rank in range(RANKS):
            self.fill(rank, placement)
        self.bell = keep(new_bell("bell"))
        own = Desk(keep(Region.private("desk", desk_bytes(LAYOUT))), LAYOUT)
        self.ranks = {rank: self.process(rank) for rank in range(1, RANKS)}
        self.ends: dict[int, float] = {}  # of faults, by rank: when they end by themselves
        desks = [own, *(rank.desk for rank in self.ranks.values())]
        desks += [Desk(keep(Region.private("desk", desk_bytes(LAYOUT))), LAYOUT) for _ in range(added)]
        self.group = ExpertGroup(self.plan, placement, desks, self.shares, self.bell, LossRule(rule), {})

    def process(self, rank: int) -> Rank:
        desk = Desk(self._keep(new_region("desk", LAYOUT)), LAYOUT)
        return Rank(desk, Work(desk, rank, self.shares))

    def fill(self, rank: int, placement: Placement, living: Sequence[int] = ()) -> None:
        """From the shares of `living` ranks, as far as these have the experts."""
        for layer in range(2):
            for slot, expert in enumerate(placement.layers[layer][rank]):
                there = [at for at in placement.holders(layer, expert) if at[0] in living]
                if there:
                    self.shares[rank].copy(layer, slot, self.shares[there[0][0]], there[0][1])
                    continue
                for kind in MATRICES:
                    self.shares[rank].put(layer, slot, kind, self.weights[layer, expert, kind])

    # --- in place of the time module, and of desk.await_answers

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.tick()

    def await_answers(self, desks: Sequence[Desk], bell: Region, time_s: float) -> list[bool]:
        until = self.now + time_s
        while not all(desk.idle for desk in desks) and self.now < until:
            self.tick()
        return [desk.idle for desk in desks]

    def tick(self) -> None:
        self.now += TICK_S
        for number in [number for number, at in self.ends.items() if at <= self.now]:
            del self.ends[number]
            self.end_fault(number)
        for rank in self.ranks.values():
            if rank.state in ("runs", "hangs"):
                for _ in range(1 + rank.held):
                    rank.desk.live()
                rank.held = 0
            elif rank.state == "cut":  # it beats and works, and nothing of it arrives
                rank.held += 1
                if not rank.desk.idle:
                    rank.answers_at = self.now
            if rank.state != "runs" or rank.desk.idle:
                continue
            if rank.answers_at is None:
                rank.answers_at = self.now + self.rng.uniform(0, LONGEST_S)
            elif self.now >= rank.answers_at:
                message = rank.desk.next_message(0.0)
                assert message is not None
                rank.work.do(message.head)
                rank.desk.answered(message.number, self.bell)
                rank.answers_at = None

    # --- faults

    def begin_fault(self, rank: int, kind: str) -> None:
        self.ranks[rank].state = kind
        if kind == "dead" and self.rng.random() < 0.7:
            self.group.died(rank)  # otherwise the watcher is late, and silence tells

    def end_fault(self, rank: int) -> None:
        if self.ranks[rank].state == "dead":
            self.group.died(rank)
            self.join(rank)
        self.ranks[rank].state = "runs"

    def join(self, rank: int) -> None:
        """A new process gets the place of this rank."""
        placement, living = self.group.restart_from(rank)
        assert rank not in living and not set(living) & {*self.group.masked}
        self.shares[rank].gate_up.zero_()
        self.shares[rank].down.zero_()
        self.fill(rank, placement, living)
        self.ranks[rank] = self.process(rank)
        self.group.arrived(rank, self.ranks[rank].desk)

    # --- a layer

    def random_layer(self) -> tuple[int, Tensor, Tensor, Tensor]:
        tokens = self.rng.choice([1, 1, 2, 30, 70])  # 70 take three rounds
        x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, TOP_K)
        chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
        return self.rng.randrange(2), x, chosen, weights

    def expected(self, layer: int, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape)
        for token, experts in enumerate(chosen.tolist()):
            for expert, weight in zip(experts, weights[token].tolist(), strict=True):
                gate, up, down = (self.weights[layer, expert, kind] for kind in MATRICES)
                inner = torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])
                out[token] += weight * (down @ inner)
        return out

    def move(self) -> None:
        """The next step begins with a move of two experts between two ranks."""
        layer, placement = self.rng.randrange(2), self.group.placement
        before = placement.layers[layer]
        a, b = self.rng.sample(range(RANKS), 2)
        give, take = set(before[a]) - set(before[b]), set(before[b]) - set(before[a])
        if not give or not take:
            return
        swap = dict(zip((g := self.rng.choice(sorted(give)), t := self.rng.choice(sorted(take))), (t, g), strict=True))
        after = [tuple(swap.get(e, e) for e in slots) if r in (a, b) else slots for r, slots in enumerate(before)]
        self.group.balance = Once(layer, placement.with_layer(layer, after))


class Once:
    """In place of Balance: one move."""

    def __init__(self, layer: int, placement: Placement) -> None:
        self.moves = [(layer, placement)]

    def next(self, counts: Tensor, placement: Placement) -> tuple[int, Placement] | None:
        return self.moves.pop() if self.moves else None


@pytest.fixture
def world(monkeypatch) -> Iterator[Callable[..., World]]:
    regions: list[Region] = []

    def keep(region: Region) -> Region:
        regions.append(region)
        return region

    def made(seed: int, replicas: int, rule: str, added: int = 0) -> World:
        torch.manual_seed(seed)
        one = World(seed, keep, replicas, rule, added)
        monkeypatch.setattr("engine.experts.group.time", one)
        monkeypatch.setattr("engine.experts.collect.time", one)
        monkeypatch.setattr("engine.experts.collect.await_answers", one.await_answers)
        return one

    yield made
    for region in regions:
        region.close()


@pytest.mark.parametrize("seed", range(12))
def test_with_copies_every_result_is_whole_and_every_rank_comes_back(world, seed):
    """One fault at a time, of any kind, and moves in between. Nobody else is masked, and no wait is longer than the
    rule's limit."""
    one = world(seed, replicas=2, rule=DROP)
    faults = 0
    for _ in range(12):
        rank, kind = one.rng.randrange(1, RANKS), one.rng.choice(KINDS)
        for step in range(10):
            if step == 3:
                one.begin_fault(rank, kind)
                faults += 1
            if step == 7:
                one.end_fault(rank)
                one.sleep(0.5)
            if step == 9 and one.rng.random() < 0.5:
                one.move()
            one.group.begin()
            layer, x, chosen, weights = one.random_layer()
            begun = one.now
            found, _ = one.group.compute(layer, x, chosen, weights, lambda: None)
            torch.testing.assert_close(found, one.expected(layer, x, chosen, weights), rtol=1e-3, atol=1e-4)
            assert not one.group.take_losses().tokens
            assert set(one.group.masked) <= ({rank} if step >= 3 else set())
            # one masking, and rounds before and after it
            limit = max(MOST_S, LEAST_ANSWER_S, ANSWERS * (LONGEST_S + 0.1)) if faults else ANSWER_S
            assert one.now - begun <= limit + 8 * LONGEST_S
        assert not one.group.masked
    assert one.group.num_masked <= faults
    assert one.group.num_moved > 0


def step(one: World, rule: str, faulty: set[int], masked: set[int] | None = None) -> None:
    """A layer while the ranks `faulty` do not answer: what no other rank has is lost and counted, the rest is right.
    No rank but these, or those of `masked`, is masked after it."""
    one.group.begin()
    layer, x, chosen, weights = one.random_layer()
    found, _ = one.group.compute(layer, x, chosen, weights, lambda: None)
    slots = one.group.placement.layers[layer]
    there = [expert for rank in range(RANKS) if rank not in faulty for expert in slots[rank]]
    gone = ~torch.isin(chosen, torch.tensor(there))
    losses = one.group.take_losses()
    assert losses.tokens == {t: int(n) for t, n in enumerate(gone.sum(1)) if n}
    for loss in losses.by_row([0], [len(x)]).values():
        assert loss.fails == (rule != DROP) and loss.dropped == gone.sum() and {*loss.ranks} <= faulty
    assert set(one.group.masked) <= (faulty if masked is None else masked)
    kept = weights.masked_fill(gone, 0)
    scale = weights.sum(1) / kept.sum(1).clamp_min(1e-20)
    wanted = one.expected(layer, x, chosen, kept) * scale[:, None] * (kept.sum(1) > 0)[:, None]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", [FAIL, DROP])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_without_copies_what_is_lost_is_counted_and_the_rest_is_right(world, seed, kind, rule):
    one = world(seed, replicas=1, rule=rule)
    rank = one.rng.randrange(1, RANKS)
    for number in range(12):
        if number == 3:
            one.begin_fault(rank, kind)
        if number == 8:
            one.end_fault(rank)
            one.sleep(0.5)
        step(one, rule, {rank} if 3 <= number < 8 else set())
    assert not one.group.masked and one.group.num_masked == 1 and one.group.num_dropped > 0


@pytest.mark.parametrize("rule", [FAIL, DROP])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_of_two_faults_at_once_only_what_both_ranks_had_is_lost(world, seed, replicas, rule):
    """They begin together or one after the other, and end in any order."""
    one = world(seed, replicas=replicas, rule=rule)
    for _ in range(3):
        ranks = one.rng.sample(range(1, RANKS), 2)
        begins = {rank: one.rng.choice([1, 1, 3]) for rank in ranks}
        ends = {rank: one.rng.choice([6, 6, 8]) for rank in ranks}
        for number in range(10):
            for rank in ranks:
                if number == begins[rank]:
                    one.begin_fault(rank, one.rng.choice(KINDS))
            ended = [rank for rank in ranks if number == ends[rank]]
            for rank in ended:
                one.end_fault(rank)
            if ended:
                one.sleep(0.5)
            step(one, rule, {rank for rank in ranks if begins[rank] <= number < ends[rank]})
        assert not one.group.masked
    assert 0 < one.group.num_masked <= 6
    assert one.group.num_dropped > 0 or replicas == 2  # two ranks may have no expert in common


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_waits_for_a_rank_that_comes_back(world, seed, kind):
    """Nothing is lost, and the rank is back in the step that has waited."""
    one = world(seed, replicas=1, rule=WAIT)
    for number in range(12):
        if number == 3:
            rank, end = one.rng.randrange(1, RANKS), one.now + one.rng.uniform(10.0, WAIT_S)
            one.begin_fault(rank, kind)
            one.ends[rank] = end
        step(one, WAIT, set(), {rank} if number >= 3 else set())  # one that needs nothing of it does not wait
    one.group.begin()
    assert end <= one.now <= end + 12 * 3 * LONGEST_S + 1.0
    assert not one.group.masked and one.group.num_masked == 1 and one.group.num_dropped == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_step_waits_no_longer_than_the_rule_says(world, seed, kind):
    """Then requests fail at once, until the rank is back."""
    one = world(seed, replicas=1, rule=WAIT)
    rank = one.rng.randrange(1, RANKS)
    for number in range(14):
        if number == 3:
            begun = one.now
            one.begin_fault(rank, kind)
        if number == 10:
            one.end_fault(rank)
            one.sleep(0.5)
        step(one, WAIT, {rank} if 3 <= number < 10 else set())
    limit = max(MOST_S, LEAST_ANSWER_S, ANSWERS * (LONGEST_S + 0.1))
    assert WAIT_S <= one.now - begun <= WAIT_S + limit + 14 * 3 * LONGEST_S
    assert not one.group.masked and one.group.num_masked == 1 and one.group.num_dropped > 0


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_the_copies_of_an_expert_get_equal_parts_of_its_tokens(world, copies):
    one = world(1, replicas=copies, rule=DROP)
    for turn in range(24):
        one.group.compute(0, torch.randn(1, HIDDEN), torch.tensor([[3, 3]]), torch.ones(1, TOP_K), lambda: None)
        assert sum(one.group.pairs) == TOP_K * (turn + 1)
    holders = [rank for rank, _ in one.group.placement.holders(0, 3)]
    assert len(holders) == copies
    assert [one.group.pairs[rank] for rank in holders] == [48 // copies] * copies


@pytest.mark.parametrize("seed", range(10))
def test_added_ranks_come_and_go_and_every_result_is_whole(world, seed):
    """The others have one copy of each expert: nothing may be lost with a rank that leaves, or dies between two steps
    or in one."""
    one = world(seed, replicas=1, rule=DROP, added=2)
    group, added = one.group, (RANKS, RANKS + 1)
    here: dict[int, list[tuple[int, ...]]] = {}
    had: dict[int, list[tuple[int, ...]]] = {}
    deaths = 0
    for _ in range(40):
        rank, end = one.rng.choice(added), one.rng.choice(["leaves", "dies", "dies in the step", "stays"])
        if rank not in here:
            one.join(rank)
            end = "stays"
        elif end == "leaves":
            group.leave(rank)
        elif end != "stays":
            one.ranks[rank].state = "dead"
            if end == "dies":
                group.died(rank)
        assert group.missing() == {} and group.lack() == 0.0
        group.begin()
        if end in ("leaves", "dies"):
            slots = here.pop(rank)
            if end == "dies":
                had[rank] = slots
        elif rank not in here:
            here[rank] = [of_ranks[rank] for of_ranks in group.placement.layers]
            assert here[rank] == had.pop(rank, here[rank])  # its process has kept them
        assert set(group.placement.members) == group.alive == {*range(RANKS), *here}
        assert group.state()["width"] == RANKS + len(here)
        layer, x, chosen, weights = one.random_layer()
        before = group.pairs[rank]
        found, _ = group.compute(layer, x, chosen, weights, lambda: None)
        torch.testing.assert_close(found, one.expected(layer, x, chosen, weights), rtol=1e-3, atol=1e-4)
        assert not group.take_losses().tokens
        noticed = end == "dies in the step" and group.pairs[rank] > before
        assert set(group.masked) == ({rank} if noticed else set())
        if end == "dies in the step":
            deaths += noticed
            if noticed:
                assert group.missing().keys() == {str(rank)} and group.lack() == 1 / (RANKS + len(here))
            group.died(rank)
            had[rank] = here.pop(rank)
            assert group.missing() == {} and group.lack() == 0.0
            group.begin()
            assert not group.masked
    assert group.num_masked == deaths and min(group.pairs[rank] for rank in added) > 0
    group.leave(0)
    group.leave(1)
    group.begin()
    assert {0, 1} <= set(group.placement.members)  # only added ranks leave
