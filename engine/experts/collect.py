"""The end of a round: waits for answers, and gives up ranks that are silent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from net.rounds.desk import Desk, await_answers
from net.rounds.silence import LOOK_S, Silence
from net.transfer.common.memory import Region


class Collector:
    """`dead`: ranks whose processes have ended, and why they count as that; another thread adds to it."""

    def __init__(self, bell: Region, dead: Mapping[int, str]) -> None:
        self._bell, self._dead = bell, dead
        self.silence = Silence()
        self.waited_s = 0.0

    def wait(self, desks: Mapping[int, Desk], asked: Sequence[int], work: int = 0) -> dict[int, str]:
        """Until every asked rank has answered or is given up. Returns why, by rank. `work`: as Silence.begin has it."""
        pending, given_up = list(asked), dict[int, str]()
        begun = time.monotonic()
        self.silence.begin(begun, {rank: desks[rank].beats for rank in pending}, work)
        while pending:
            done = await_answers([desks[rank] for rank in pending], self._bell, LOOK_S / 2)
            pending = [rank for rank, answered in zip(pending, done, strict=True) if not answered]
            if not pending:
                break
            queued = [rank for rank in pending if desks[rank].queued]
            late = self.silence.look(time.monotonic(), {rank: desks[rank].beats for rank in pending}, queued)
            for rank in list(pending):
                if (ended := self._dead.get(rank)) is not None:
                    given_up[rank] = ended
                elif rank in late:
                    given_up[rank] = f"it shows no sign of life for {self.silence.limit_s(rank):.1f} s"
                    if self.silence.beats_without_answer(rank):
                        given_up[rank] = f"it lives and does not answer within {self.silence.answer_limit_s:.1f} s"
                else:
                    continue
                pending.remove(rank)
        self.silence.end(whole=not given_up)
        self.waited_s += time.monotonic() - begun
        return given_up
