"""An arena whose parts are on several GPUs, as one device of transfers (net/transfer/device/staging.py).

Untried on GPUs, see rank_arenas.py; over tests/late_gpu.py every order of its streams is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from engine.loading.cuda_memory import CudaCopying, CudaMemory, Move
from engine.loading.split_arena import SplitArena
from engine.model.gpu import Gpu
from net.transfer.common.memory import Region


class SplitMemory(CudaMemory):
    """A SplitArena over CUDA tensors. See net.transfer.device.memory.Device."""

    def __init__(self, split: SplitArena, gpu: Gpu | None = None) -> None:
        super().__init__(split.parts[0], gpu)
        self._split = split
        self.nbytes = split.nbytes
        self._others = [self._gpu.stream(part) for part in split.parts[1:]]

    def copy_out(self, host: Region, moves: Sequence[Move]) -> CudaCopying:
        return self._queued(self._split.copy_out, host, moves)

    def copy_in(self, host: Region, moves: Sequence[Move]) -> CudaCopying:
        return self._queued(self._split.copy_in, host, moves)

    def _queued(
        self, copy: Callable[[Tensor, Sequence[Move]], None], host: Region, moves: Sequence[Move]
    ) -> CudaCopying:
        """On a stream of each GPU; torch orders copies between two GPUs behind the current streams of both."""
        with ExitStack() as stack:
            for stream in (*self._others, self._stream):  # rank 0's last: its GPU is the current one inside
                stack.enter_context(self._gpu.on(stream))
            copy(torch.frombuffer(host.memory, dtype=torch.uint8), moves)
            for stream in self._others:
                self._stream.wait_stream(stream)
            return CudaCopying(self._gpu.mark(self._bytes))
