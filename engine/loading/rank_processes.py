"""RankProcesses: rank 0's side of tensor parallelism. It starts the other ranks and sends them each step.

A node is one process on the network; the other ranks are its children (rank_worker.py), each with a part of the
weights. On CPUs each has the whole KV arena in its address space; on GPUs each has an arena of its own, and rank 0 maps
it. Rank 0 sends every step's rows down a socket pair, and all compute the same forward pass. The socket is also the
lifeline: a child ends when it closes, however rank 0 ended.

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

import torch  # lets a connection send tensors: memory that both processes have then
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from cache.block import BlockGeometry
from engine.checkpoint.model_source import ModelSource
from engine.config.config import Config
from engine.model.model_error import ModelError
from engine.model.parallel import OwnRanks, ProcessRanks, connected
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from engine.sampling.token_logprobs import PromptLogprobs
from engine.step.runner import Row
from net.transfer.common.memory import Region
from net.transfer.common.private_directory import PrivateDirectory

log = logging.getLogger("mooncake.ranks")

ROOT = Path(__file__).resolve().parents[2]
WORKER = "engine.loading.rank_worker"
END_TIMEOUT_S = 10.0
SAMPLED = SamplingRow(SamplingParams(), [], 0)
"""Stands for any sampling parameters: only rank 0 chooses tokens, the others need to know which rows have logits."""


def bare_row(row: Row) -> Row:
    """What another rank needs of it."""
    sample = None if row.sample is None else SAMPLED
    scores = None if row.scores is None else replace(row.scores, found=PromptLogprobs())
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
    memfd: int | None  # of the KV arena; None: the rank makes one of its own heads
    store: str  # file in which the ranks find each other


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer of a rank once it is ready for its first step."""

    error: str | None = None  # why it will never be
    part: Tensor | None = None  # its own KV arena, uint8 [bytes]


class RankProcesses:
    """Ranks 1 to n - 1 of this node. The constructor returns while they load; `join` waits for them."""

    def __init__(self, config: Config, geometry: BlockGeometry, source: ModelSource, kv: Region | None) -> None:
        """kv: the arena that all ranks share; None: each makes its own (`parts`)."""
        self._size, self._device = config.tensor_parallel_size, torch.device(config.device)
        self._collectives = config.collectives
        self._directory = PrivateDirectory()
        self._store = str(self._directory.path / "store")
        self._lock = threading.Lock()
        self.lost: str | None = None  # why the ranks are out of step
        self.parts: list[Tensor] = []  # of the other ranks, once they have joined
        self._ranks: ProcessRanks | OwnRanks | None = None
        self._closing = False
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self._size):
            self._start(Start(rank, config, geometry, source, None if kv is None else kv.memfd, self._store))

    def _start(self, start: Start) -> None:
        ours, theirs = Pipe()
        self._links.append(ours)
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the node's stdout belongs to the process that started it
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=(theirs.fileno(), *([] if start.memfd is None else [start.memfd])),
            )
        )
        theirs.close()
        ours.send(start)

    def join(self) -> ProcessRanks | OwnRanks:
        """Wait until the others have loaded and connect to them. Raises ModelError with the error of one of them."""
        for rank, link in enumerate(self._links, 1):
            try:
                loaded: Loaded = link.recv()
            except EOFError:
                code = self._processes[rank - 1].wait()
                loaded = Loaded(f"it ended with exit code {code}; its log above says why")
            if loaded.error is not None:
                raise ModelError(f"--tensor-parallel-size {self._size}: rank {rank}: {loaded.error}")
            if loaded.part is not None:
                self.parts.append(loaded.part)
        store = FileStore(self._store, self._size)
        self._ranks = ranks = connected(store, 0, self._size, self._device, self._collectives)
        if self._device.type == "cpu":  # NCCL's threads may look into the store as long as they live
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
            if self._device.type != "cpu":  # behind an aborted collective the results are of no use
                torch.accelerator.synchronize()
                if self.lost is not None:
                    raise RanksLost(self.lost)
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
        if self._ranks is not None and self._device.type != "cpu":
            self._ranks.abort()  # on a CPU, the calls see by themselves that a rank is gone
        os.kill(os.getpid(), signal.SIGTERM)
