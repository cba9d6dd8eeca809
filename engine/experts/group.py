"""ExpertGroup: the experts of all ranks as rank 0 calls them, layer by layer.

    route      weights, experts of each token                       the router, on rank 0
    dispatch   one message to each rank that has work               rows once per token and rank, and their pairs
    compute    rank 0's own experts, and the shared expert          while the other ranks compute theirs
    combine    the answers' rows of a token, summed in float32

A rank that does not answer (collect.py) is masked: its pairs go to copies on other ranks in a second round. Pairs
without any copy are lost, and losses.py says what follows. Masked ranks come back between two steps: when a new process
has their place, or the old one answers again.

A node may have no experts itself: then rank 0 is a process as the others are, and other nodes may ask it too.

The last ranks of a plan may be added ones. They join and leave between two steps, and hold only further copies: nothing
is lost with them, and one whose process has ended has left.

The engine's thread calls everything except what "from other threads" below has: any thread may call that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.experts.collect import Collector
from engine.experts.dispatch import Dispatch
from engine.experts.mover import Mover
from engine.experts.placing.added import further_copies
from engine.experts.placing.balance import Balance
from engine.experts.placing.moves import Move
from engine.experts.placing.placement import Placement, Slots
from engine.experts.plan import Plan
from engine.experts.share import Share
from engine.experts.work import COMPUTE, Work
from engine.model.experts.losses import WAIT, Losses
from engine.model.experts.routing import Router
from engine.model.model_error import ModelError
from net.rounds.desk import Desk
from net.transfer.common.memory import Region

log = logging.getLogger("mooncake.experts")

DECODE_STEPS = 10
"""Steps over which `decode_s` is averaged."""

WAIT_S = 60.0
"""How long after the loss of a rank --expert-loss wait waits for it. Then the requests fail that need its experts."""
POLL_S = 0.05
ENDED = "its process has ended"


@dataclass(frozen=True, slots=True)
class LossRule:
    """--expert-loss, and how long `wait` waits."""

    name: str
    wait_s: float = WAIT_S


class ExpertGroup:
    """`desks`: of all ranks; rank 0's own is private memory, if this process is rank 0. `shares`: of the ranks of this
    host. `absent`: ranks that have not been there yet, and why; what their desks are does not matter."""

    def __init__(
        self,
        plan: Plan,
        placement: Placement,
        desks: list[Desk],
        shares: Mapping[int, Share],
        bell: Region,
        rule: LossRule,
        absent: Mapping[int, str],
    ) -> None:
        self.placement = placement
        self.alive = {*placement.members} - {*absent}
        self.masked = dict(absent)  # why
        self.counts = torch.zeros(len(plan.layers), plan.num_experts, dtype=torch.int64)
        self.pairs = [0] * plan.ranks  # (token, expert) pairs that each rank was asked for
        self.num_masked = self.num_dropped = self.num_moved = 0
        self.decode_s = 0.0  # seconds of a decode step for rank 0's own experts and for waiting; 0 = not known
        self._own_s = 0.0  # in rank 0's own experts
        self.balance: Balance | None = None
        self._plan, self._desks, self._rule = plan, desks, rule
        self._own = None if plan.shared else Work(desks[0], 0, shares)
        self._dead = dict(absent)
        self._beats: dict[int, int] = {}  # of masked ranks, when they were masked
        self._until: dict[int, float] = {}  # of masked ranks: when `wait` gives them up
        self._arrivals: dict[int, Desk] = {}
        self._added: dict[int, list[Slots]] = {}  # experts of ranks that join or have joined
        self._leaving: set[int] = set()
        self._lock = threading.Lock()  # of _dead, _arrivals, _added and _leaving
        self._moving = threading.Lock()  # held while experts move
        self._collector = Collector(bell, self._dead)
        self.mover = None if self._own is None else Mover(self._own, desks, shares, self._answered)
        self._only: Tensor | None = None
        self._losses = Losses(rule.name)
        self._lack: tuple[set[int], set[int], Placement, float] = set(), set(), placement, 0.0
        self._turn = 0
        self._dispatch = Dispatch(plan, desks)
        self._tables: list[Tensor] = []
        self._uncovered: list[bool] = []
        self._tabulate()

    # --- from other threads

    def died(self, rank: int, why: str = ENDED) -> None:
        """Its process has ended, also one that has arrived and has no place yet."""
        with self._lock:
            self._dead[rank] = why
            self._arrivals.pop(rank, None)
            self._leaving.discard(rank)

    def arrived(self, rank: int, desk: Desk) -> None:
        """A new process is ready to answer at `desk`, from the next step on."""
        with self._lock:
            self._arrivals[rank] = desk

    def restart_from(self, rank: int) -> tuple[Placement, tuple[int, ...]]:
        """What a new process begins with, after `died(rank)`, or as an added rank: where experts lie, and the other
        ranks here that have theirs.
        Waits for the end of a move that is under way. No other move begins before the process has its place: what it
        reads in the shares of these ranks stays true."""
        with self._moving:
            placement = self.placement if rank < self._plan.least else self._with_added(rank)
            return placement, tuple(sorted(one for one in self.alive - {rank} if one < self._plan.local))

    def _with_added(self, rank: int) -> Placement:
        """One that was lost and comes back gets what it had, so that its process has nothing to load."""
        with self._lock:
            placement = self.placement
            for other, slots in self._added.items():
                placement = placement.with_rank(other, slots)
            if rank not in self._added:
                loads = [[count + 1 for count in of_layer] for of_layer in self.counts.tolist()]
                self._added[rank] = [further_copies(placement, layer, of) for layer, of in enumerate(loads)]
            return placement.with_rank(rank, self._added[rank])

    def elsewhere(self, layer: int, expert: int) -> list[tuple[Desk, int]]:
        """The desks of living ranks of other hosts that have it, and its slots there."""
        found = []
        with self._lock:
            for rank, slot in self.placement.holders(layer, expert):
                desk = self._arrivals.get(rank)
                if desk is None and rank in self.alive and rank not in self._dead:
                    desk = self._desks[rank]
                if desk is not None and rank >= self._plan.local:
                    found.append((desk, slot))
        return found

    def leave(self, rank: int) -> None:
        """The process of a rank would like to end: the next step begins without it. Others than added ones stay."""
        with self._lock:
            if rank in self._added:
                self._leaving.add(rank)

    def missing(self) -> dict[str, str]:
        """The ranks that the next step does without, and why."""
        masked = dict(self._dead) | dict(self.masked)
        back = set(self._arrivals) | self._gone()
        return {str(rank): masked[rank] for rank in sorted(masked) if rank not in back and not self._answers(rank)}

    def lack(self) -> float:
        """Share of the ranks that the next step does without; 1 if experts are lost with them."""
        missing, gone = {*map(int, self.missing())}, self._gone()
        if not missing:
            return 0.0
        *known, placement, share = self._lack
        if known != [missing, gone] or placement is not self.placement:
            placement = self.placement
            there = {*placement.members} - gone
            alive = there - missing
            layers = range(len(placement.layers))
            lost = any(row[0] < 0 for layer in layers for row in placement.table(layer, alive, 1))
            share = 1.0 if lost else len(missing) / len(there)
            self._lack = missing, gone, placement, share
        return share

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        return {
            "ranks": self._plan.ranks,
            "width": len(self.placement.members),
            "masked": self.missing(),
            "times_masked": self.num_masked,
            "dropped_pairs": self.num_dropped,
            "moved_experts": self.num_moved,
            "waited_s": self._collector.waited_s,
            "computed_s": self._own_s,
            "decode_step_s": self.decode_s,
            "pairs_by_rank": list(self.pairs),
            "choices_by_expert": self.counts.sum(0).tolist(),
        }

    # --- steps

    def begin(self) -> None:
        """Before each step: ranks come back, experts move."""
        self._losses = Losses(self._rule.name)
        self._only = None
        self._adopt()
        if self.balance is None:
            return
        with self._moving:
            well = not self.masked and not self._dead
            if well and (move := self.balance.next(self.counts, self.placement)) is not None:
                self._move(*move)

    def only(self, tokens: Tensor) -> None:
        """The layers that follow compute only these tokens of the step [n] int64."""
        self._only = tokens

    def take_losses(self) -> Losses:
        """Of the step that has ended."""
        return self._losses

    @contextmanager
    def step(self, rows: Sequence[Any]) -> Iterator[None]:
        """Around a forward pass of these rows (engine/step/inputs.py)."""
        self.begin()
        before_s = self._experts_s
        yield
        if all(len(row.token_ids) == row.num_wanted for row in rows):  # nobody's prompt
            seconds = self._experts_s - before_s
            self.decode_s += (seconds - self.decode_s) / (DECODE_STEPS if self.decode_s else 1)

    @property
    def _experts_s(self) -> float:
        """Seconds of all steps that more ranks would shorten."""
        return self._own_s + self._collector.waited_s

    def layer(self, index: int, router: Router, shared: Callable[[Tensor], Tensor] | None) -> ExpertLayer:
        """The experts of the model's layer `index`."""
        return ExpertLayer(self, self._plan.layers.index(index), router, shared)

    # --- rounds

    def compute(
        self,
        layer: int,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        meanwhile: Callable[[], Tensor | None],
        first: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, H], chosen and weights [T, k] -> the sum of the experts' results [T, H], and what `meanwhile` returned,
        which runs while other ranks compute. `first`: row of the layer that x[0] is. Raises ValueError for x of another
        type than the messages have."""
        if str(x.dtype) != f"torch.{self._plan.layout.dtype}":
            raise ValueError(f"rows of {x.dtype} are not of {self._plan.layout.dtype}, as messages to the ranks are")
        most = self._plan.layout.most_rows
        if len(x) > most:
            parts = [
                self.compute(layer, x[i : i + most], chosen[i : i + most], weights[i : i + most], lambda: None, i)[0]
                for i in range(0, len(x), most)
            ]
            return torch.cat(parts), meanwhile()
        out = torch.empty_like(x)
        self._turn += 1
        sent, failed, other = self._round(layer, x, chosen, weights, meanwhile, count=True)
        if not failed and not self._uncovered[layer]:
            self._dispatch.combine(self._desks, failed, None, out)
            return out, other
        total = torch.empty(x.shape)
        self._dispatch.combine(self._desks, failed, None, total)
        open_pairs = chosen.where((sent == -1) | _isin(sent, failed), -1)
        while (open_pairs >= 0).any():
            sent, failed, _ = self._round(layer, x, open_pairs, weights, lambda: None)
            self._dispatch.combine(self._desks, failed, total, total)
            open_pairs = open_pairs.where((sent == -1) | _isin(sent, failed), -1)
            if failed:
                continue
            if not self._worth_waiting(layer, open_pairs):
                break
            time.sleep(POLL_S)
            self._adopt()
        self._lose(open_pairs >= 0, weights, total, first)
        return total.to(x.dtype), other

    def _round(
        self,
        layer: int,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        meanwhile: Callable[[], Tensor | None],
        count: bool = False,
    ) -> tuple[Tensor, list[int], Tensor | None]:
        """(rank of each pair, -1 without one; ranks that failed; what `meanwhile` returned)."""
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        counts = self.counts[layer] if count else None
        sent = self._dispatch.send(x, chosen, weights, self._tables[layer], counts, self._turn)
        rows, pairs = self._dispatch.rows, self._dispatch.pairs
        asked = [rank for rank in range(0 if self._own is None else 1, self._plan.ranks) if rows[rank]]
        self.pairs = [sum(both) for both in zip(self.pairs, pairs, strict=True)]
        for rank in asked:
            self._desks[rank].ask(COMPUTE, layer, rows[rank], pairs[rank])
        if self._own is not None and rows[0]:
            begun = time.monotonic()
            self._own.compute(layer, rows[0], pairs[0], self._dispatch.own(x))
            self._own_s += time.monotonic() - begun
        other = meanwhile()
        work = max((pairs[rank] for rank in asked), default=0)
        failed = self._collector.wait(self._desks_by_rank, asked, work) if asked else {}
        for rank, why in failed.items():
            self._mask(rank, why)
        return sent, list(failed), other

    def _worth_waiting(self, layer: int, lost: Tensor) -> bool:
        """Whether a rank with one of the experts `lost` [T, k], -1 for none, may still come back in time."""
        if self._rule.name != WAIT:
            return False
        experts, now = set(lost[lost >= 0].tolist()), time.monotonic()
        ranks = [rank for rank, until in self._until.items() if now < until]
        return any(experts.intersection(self.placement.layers[layer][rank]) for rank in ranks)

    def _lose(self, lost: Tensor, weights: Tensor, total: Tensor, first: int) -> None:
        """`lost` [T, k] pairs have no result; `total` [T, H] is scaled by the weights of those that have. `first`: row
        of the layer that total[0] is."""
        by_token = lost.sum(1)
        if not by_token.any():
            return
        whole = weights.sum(1)
        kept = weights.masked_fill(lost, 0).sum(1)
        total.mul_(torch.where(kept > 0, whole / kept.clamp_min(1e-20), torch.zeros_like(kept))[:, None])
        self.num_dropped += int(by_token.sum())
        self._losses.masked = tuple(sorted(self.masked))
        for token in by_token.nonzero()[:, 0].tolist():
            at = first + token if self._only is None else int(self._only[first + token])
            self._losses.add(at, int(by_token[token]))

    # --- ranks

    @property
    def _desks_by_rank(self) -> dict[int, Desk]:
        return dict(enumerate(self._desks))

    def _mask(self, rank: int, why: str) -> None:
        log.warning("rank %d of the experts is masked: %s", rank, why)
        self.alive.discard(rank)
        self.masked[rank] = why
        self.num_masked += 1
        self._beats[rank] = self._desks[rank].beats
        self._until[rank] = time.monotonic() + self._rule.wait_s
        self._tabulate()

    def _adopt(self) -> None:
        """Unmask ranks with a new process, and those that live and have answered everything."""
        with self._lock:
            arrived, self._arrivals = self._arrivals, {}
            leaving, self._leaving = self._leaving, set()
            for rank, desk in arrived.items():
                self._desks[rank].close()
                self._desks[rank] = desk
                self._dispatch.replace(rank, desk)
                self._dead.pop(rank, None)
                if rank in self._added:
                    self.placement = self.placement.with_rank(rank, self._added[rank])
            for rank in leaving:
                self._added.pop(rank)
        for rank in arrived:
            self._unmask(rank, "a new process has its place")
        for rank in list(self.masked):
            if self._answers(rank):
                self._unmask(rank, "it answers again")
        for rank in leaving:
            self._part(rank, "it asked for that")
            self._desks[rank].dismiss()
        for rank, why in dict(self._dead).items():
            if rank in self.placement.members and rank >= self._plan.least:
                self._part(rank, why)
            elif rank in self.alive:
                self._mask(rank, why)

    def _answers(self, rank: int) -> bool:
        """Whether a masked rank lives and has answered everything."""
        desk, beats = self._desks[rank], self._beats.get(rank)
        return rank not in self._dead and beats is not None and desk.idle and desk.beats > beats + 1

    def _unmask(self, rank: int, why: str) -> None:
        log.info("rank %d of the experts is here: %s", rank, why)
        self._forget(rank)
        self.alive.add(rank)
        self._tabulate()

    def _part(self, rank: int, why: str) -> None:
        """An added rank is no longer there."""
        log.info("rank %d of the experts has left: %s", rank, why)
        self._forget(rank)
        self.alive.discard(rank)
        self.placement = self.placement.without(rank)
        self._tabulate()

    def _forget(self, rank: int) -> None:
        self._collector.silence.forget([rank])
        self.masked.pop(rank, None)
        self._beats.pop(rank, None)
        self._until.pop(rank, None)

    def _gone(self) -> set[int]:
        """Added ranks whose processes have ended: the next step begins without them."""
        return {rank for rank in dict(self._dead) if rank >= self._plan.least}

    def _tabulate(self) -> None:
        layers = range(len(self._plan.layers))
        columns = self._plan.columns
        tables = (self.placement.table(layer, self.alive, columns) for layer in layers)
        self._tables = [torch.tensor(table, dtype=torch.int32) for table in tables]
        self._uncovered = [bool((table < 0).any()) for table in self._tables]

    # --- moves

    def _move(self, layer: int, placement: Placement) -> None:
        """Bring experts to the ranks where `placement` has them; the placement counts from then on. If a rank is lost
        before all have them, nothing has changed."""
        assert self.mover is not None, "with experts elsewhere only, none moves"
        move = Move.between(self.placement, placement, layer, self._plan.local)
        try:
            failed = self.mover.bring(move)
        except (ModelError, OSError) as error:
            log.warning("experts of layer %d cannot move: %s", layer, error)
            return
        if self._lost(failed):
            return
        self.placement = placement
        self._lost(self.mover.commit(move))
        self.num_moved += move.count
        self._tabulate()

    def _answered(self, ranks: list[int]) -> dict[int, str]:
        return self._collector.wait(self._desks_by_rank, ranks) if ranks else {}

    def _lost(self, failed: Mapping[int, str]) -> bool:
        for rank, why in failed.items():
            self._mask(rank, why)
        return bool(failed)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Called with x [T, H]; returns [T, H]: as engine/model/experts/moe.py, over the ranks."""

    group: ExpertGroup
    layer: int
    router: Router
    shared: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        shared = self.shared
        meanwhile = (lambda: None) if shared is None else (lambda: shared(x))
        summed, other = self.group.compute(self.layer, x, chosen, weights, meanwhile)
        return summed if other is None else summed + other


def _isin(sent: Tensor, ranks: Sequence[int]) -> Tensor:
    return torch.isin(sent, torch.tensor(ranks, dtype=sent.dtype))
