"""Ranks whose KV arenas are apart, without GPUs: what stands in for CUDA in rank 0's process and, run as a module, in
the others (engine/loading/rank_worker.py with the same stand-ins).

A rank's arena is a CPU tensor that it sends to rank 0 as it would send a CUDA tensor, and copies come late.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any, ClassVar

import pytest
import torch

import engine.loading.load_model
from engine.loading import rank_arenas, rank_processes, rank_worker
from engine.loading.split_arena import SplitArena
from tests.net.fake_device import FakeDevice

KEY = b"tensors in memory of the CPU are handed over through a socket with this key"


def own_part(geometry: Any, num_blocks: int, shard: Any) -> torch.Tensor:
    nbytes = num_blocks * rank_arenas.part_of(geometry, shard).block_bytes
    return torch.zeros(nbytes, dtype=torch.uint8).share_memory_()


class SplitDevice(FakeDevice):
    """Stands in for rank_arenas.SplitMemory."""

    made: ClassVar[list[SplitDevice]] = []

    def __init__(self, split: SplitArena) -> None:
        super().__init__(0, seed=len(self.made))
        self.nbytes, self.split = split.nbytes, split
        self.made.append(self)

    def _copy(self, direction: str, host: Any, moves: Any, delay_s: float) -> None:
        self.log.append(("begin", direction))
        time.sleep(delay_s)
        copy = self.split.copy_out if direction == "out" else self.split.copy_in
        copy(torch.frombuffer(host.memory, dtype=torch.uint8), moves)
        self.log.append(("end", direction))


def stand_in(patch: pytest.MonkeyPatch) -> list[SplitDevice]:
    """Nodes of several ranks that are started in this process keep KV apart from now on -> their devices."""
    patch.setattr(SplitDevice, "made", [])
    patch.setattr(multiprocessing.current_process(), "authkey", KEY)
    patch.setattr(engine.loading.load_model, "splits_arena", lambda config: True)
    patch.setattr(rank_arenas, "own_part", own_part)
    patch.setattr(rank_arenas, "SplitMemory", SplitDevice)
    patch.setattr(rank_processes, "WORKER", __name__)
    return SplitDevice.made


if __name__ == "__main__":
    multiprocessing.current_process().authkey = KEY
    rank_arenas.own_part = own_part
    sys.exit(rank_worker.main(int(sys.argv[1])))
