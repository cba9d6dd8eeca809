"""The process of a tensor-parallel rank above 0: it loads a shard, then computes every step that rank 0 sends.

Started by rank_processes.py with the descriptor of a socket pair as its only argument. It ends when that socket
closes, whatever it is doing then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from engine.core.kv_ready import KV_REGION
from engine.core.priority import step_back
from engine.loading import rank_arenas
from engine.loading.load_model import blocks_in, device_of, load_rank
from engine.loading.rank_processes import Loaded, Start
from engine.model.model_error import ModelError
from engine.model.parallel import OwnRanks, ProcessRanks, Shard, connected
from engine.observe import logs
from net.transfer.common.memory import Region


def main(descriptor: int) -> int:
    # Signals to the whole process group are for rank 0: it closes the socket when it has finished its step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(descriptor,), daemon=True).start()
    link = Connection(descriptor)
    try:
        start: Start = link.recv()
        device = torch.device(device_of(start.config, start.rank))
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before anything else asks for a GPU: it would get rank 0's
        logs.configure(start.config.log_level, start.config.log_format, node_id=start.config.node_id, rank=start.rank)
        step_back(start.config.engine_nice)  # before any thread of the model starts
        part: Tensor | None = None

        def join() -> ProcessRanks | OwnRanks:
            link.send(Loaded(part=part))
            size = start.config.tensor_parallel_size
            store = FileStore(start.store, size)
            return connected(store, start.rank, size, device, start.config.collectives)

        try:
            kv, part = arena(start)
            runner = load_rank(start.config, start.geometry, start.source, kv, start.rank, join)
        except (ModelError, ValueError, torch.OutOfMemoryError) as error:
            link.send(Loaded(str(error)))
            return 1
        while True:
            runner.follow(link.recv())
    except EOFError:
        return 0


def arena(start: Start) -> tuple[Tensor, Tensor | None]:
    """This rank's heads of the arena's blocks, and, where it has an arena of its own, that memory."""
    shard = Shard(start.source.config, start.rank, start.config.tensor_parallel_size)
    if start.memfd is not None:
        region = Region.attach(KV_REGION, start.memfd, start.config.kv_cache_bytes)
        return blocks_in(region, start.geometry)[:, :, :, shard.kv_heads], None
    part = rank_arenas.own_part(start.geometry, start.config.kv_cache_bytes // start.geometry.block_bytes, shard)
    return rank_arenas.pool_of(part, start.geometry, shard), part


def end_with(descriptor: int) -> None:
    """End this process when the other end of the socket is closed, also in the middle of a collective."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP needs no asking
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
