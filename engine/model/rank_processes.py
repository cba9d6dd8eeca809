"""RankProcesses: rank 0's side of tensor parallelism. It starts the other ranks and tells them each step.

A node is one process on the network; the other ranks are its children (rank_worker.py), each with a part of the
weights and the whole KV arena in its address space. Rank 0 sends every step's rows down a socket pair, and all compute
the same forward pass. The socket is also the lifeline: a child ends when it closes, however rank 0 ended.

A rank that is lost, or a step that raises halfway, leaves the ranks out of step with each other, and a collective would
mix the data of two steps. There is no way on from there: the node says so, leaves the cluster and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from cache.block import BlockGeometry
from engine.checkpoint.model_source import ModelSource
from engine.config import Config
from engine.model.model_error import ModelError
from engine.model.parallel import ProcessRanks
from engine.request import SamplingParams
from engine.runner import Row
from engine.sampling.sampler import SamplingRow
from net.memory import Region
from net.private_directory import PrivateDirectory

log = logging.getLogger("mooncake.ranks")

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 10.0
SAMPLED = SamplingRow(SamplingParams(), [], 0)
"""Stands for any sampling parameters: only rank 0 chooses tokens, the others need to know which rows have logits."""


def bare_row(row: Row) -> Row:
    """What another rank needs of it."""
    sample = None if row.sample is None else SAMPLED
    scores = None if row.scores is None else replace(row.scores, found=[])
    return replace(row, sample=sample, proposals=(), scores=scores)


class RanksLost(RuntimeError):
    """The ranks are out of step; this node cannot compute any more."""


@dataclass(frozen=True, slots=True)
class Start:
    """All that a rank is told before the first step."""

    rank: int
    config: Config
    geometry: BlockGeometry
    source: ModelSource
    memfd: int  # of the KV arena
    kv_bytes: int
    store: str  # file in which the ranks find each other


class RankProcesses:
    """Ranks 1 to n - 1 of this node. The constructor returns while they load; `join` waits for them."""

    def __init__(self, config: Config, geometry: BlockGeometry, source: ModelSource, kv: Region) -> None:
        assert kv.memfd is not None
        self._size, self._device = config.tensor_parallel_size, config.device
        self._directory = PrivateDirectory()
        self._store = str(self._directory.path / "store")
        self._lock = threading.Lock()
        self.lost: str | None = None  # why the ranks are out of step
        self._closing = False
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self._size):
            self._start(Start(rank, config, geometry, source, kv.memfd, kv.nbytes, self._store))

    def _start(self, start: Start) -> None:
        ours, theirs = Pipe()
        self._links.append(ours)
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.model.rank_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the node's own stdout is for whoever started it
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=(theirs.fileno(), start.memfd),
            )
        )
        theirs.close()
        ours.send(start)

    def join(self) -> ProcessRanks:
        """Wait until the others have loaded and connect to them. Raises ModelError with what one of them met."""
        for rank, link in enumerate(self._links, 1):
            try:
                error = link.recv()
            except EOFError:
                code = self._processes[rank - 1].wait()
                error = f"it ended with exit code {code}; its log above says why"
            if error is not None:
                raise ModelError(f"--tensor-parallel-size {self._size}: rank {rank}: {error}")
        ranks = ProcessRanks(FileStore(self._store, self._size), 0, self._size, torch.device(self._device))
        self._directory.close()
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        return ranks

    @contextmanager
    def step(self, rows: Sequence[Row]) -> Iterator[None]:
        """Around rank 0's forward pass: the other ranks compute the same rows. Raises RanksLost."""
        if self.lost is not None:
            raise RanksLost(self.lost)
        bare = [bare_row(row) for row in rows]
        try:
            for link in self._links:
                link.send(bare)
            yield
        except Exception as error:
            self._lose(f"a step failed halfway ({type(error).__name__}: {error})")
            raise RanksLost(self.lost) from error

    def close(self) -> None:
        """End the other ranks and wait for them."""
        with self._lock:
            self._closing = True
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._lose(f"tensor-parallel rank {rank} ended with exit code {code}")

    def _lose(self, why: str) -> None:
        """Once: end the other ranks, and this node as if it had been told to stop."""
        with self._lock:
            if self._closing or self.lost is not None:
                return
            self.lost = why
        log.critical("%s: this node cannot compute any more and ends", why)
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        os.kill(os.getpid(), signal.SIGTERM)
