"""Mover: brings experts of one layer to other ranks, between two steps (placing/moves.py says which way each takes)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.experts.placing.moves import Move
from engine.experts.pulling import MEMORY, Brought, Sources
from engine.experts.share import Share
from engine.experts.work import COMMIT, STAGE, TAKE, Work
from net.rounds.desk import Desk
from net.rounds.remote_desk import RemoteDesk


class Mover:
    """Rank 0's. `own`: its work. `desks`: of all ranks, as they are at each call. `shares`: of the ranks of this host.
    `answered`: waits for these ranks; returns those that are lost, and why.

    `sources`: where moves find experts that no rank of this host has. ExpertProcesses sets it; None for ranks that are
    no processes."""

    def __init__(
        self,
        own: Work,
        desks: Sequence[Desk],
        shares: Mapping[int, Share],
        answered: Callable[[list[int]], dict[int, str]],
    ) -> None:
        self.sources: Sources | None = None
        self._own, self._desks, self._shares, self._answered = own, desks, shares, answered

    def bring(self, move: Move) -> dict[int, str]:
        """Every rank gets what it is to have, and uses it from `commit` on. Returns the ranks that are lost, and why:
        then nothing has changed. Raises ModelError, OSError if an expert cannot be read."""
        brought = self._brought(move)
        if failed := self._stage(move) or self._give(move, brought):
            self._shares[0].drop_staged()
            return failed
        for rank, slot, expert in move.written:
            self._shares[rank].take(move.layer, slot, brought[expert].share)
        if self.sources is not None:
            for expert in move.come_to_rank_0:
                self.sources.count(brought[expert].origin)
            self.sources.count(MEMORY, move.count - len(move.come_to_rank_0))
        return {}

    def commit(self, move: Move) -> dict[int, str]:
        """All use what they got. Returns the ranks that are lost, and why."""
        others = [rank for rank in (*move.copied, *move.sent) if rank]
        for rank in others:
            self._desks[rank].ask(COMMIT, move.layer, 0, 0)
        self._shares[0].commit()
        return self._answered(others)

    def _brought(self, move: Move) -> dict[int, Brought]:
        """The experts that only ranks elsewhere have."""
        if not move.far:
            return {}
        with self._elsewhere().opened() as bring:
            copies = {expert: [(self._desks[rank], slot) for rank, slot in at] for expert, at in move.far.items()}
            return {expert: bring(move.layer, expert, there) for expert, there in copies.items()}

    def _elsewhere(self) -> Sources:
        assert self.sources is not None, "ranks of other hosts are processes"
        return self.sources

    def _stage(self, move: Move) -> dict[int, str]:
        """The ranks of this host copy what they get. Returns those that are lost, and why."""
        others = [rank for rank in move.copied if rank]
        for rank in others:
            Work(self._desks[rank], rank, self._shares).put_moves(move.copied[rank])
            self._desks[rank].ask(STAGE, move.layer, len(move.copied[rank]), 0)
        own = move.copied.get(0, [])
        self._own.put_moves(own)
        self._own.stage(move.layer, len(own))
        return self._answered(others)

    def _give(self, move: Move, brought: Mapping[int, Brought]) -> dict[int, str]:
        """The ranks elsewhere get theirs, one each at a time. Returns those that are lost, and why."""
        for turn in range(max(map(len, move.sent.values()), default=0)):
            asked = [rank for rank, moves in move.sent.items() if turn < len(moves)]
            for rank in asked:
                slot, expert, there = move.sent[rank][turn]
                if there is None:
                    views = brought[expert].share.bytes_of(0, 0)
                else:
                    views = self._shares[there[0]].bytes_of(move.layer, there[1])
                desk, told = self._desks[rank], self._elsewhere().checksum(move.layer, expert, views)
                assert isinstance(desk, RemoteDesk)
                desk.give(views, TAKE, move.layer, 0, 0, slot, expert, int(turn == 0), told)
            if failed := self._answered(asked):
                return failed
        return {}
