"""The process of a tensor-parallel rank above 0: load a shard, then compute every step that rank 0 sends.

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
from torch._C._distributed_c10d import FileStore

from engine import logs
from engine.kv.incoming import KV_REGION
from engine.loading import blocks_in, load_rank
from engine.model.model_error import ModelError
from engine.model.parallel import ProcessRanks
from engine.model.rank_processes import Start
from engine.priority import step_back
from net.memory import Region


def main(descriptor: int) -> int:
    # Signals to the whole process group are for rank 0: it closes the socket when it has finished its step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(descriptor,), daemon=True).start()
    link = Connection(descriptor)
    try:
        start: Start = link.recv()
        logs.configure(start.config.log_level, start.config.log_format, node_id=start.config.node_id, rank=start.rank)
        step_back(start.config.engine_nice)  # before any thread of the model starts
        region = Region.attach(KV_REGION, start.memfd, start.kv_bytes)

        def join() -> ProcessRanks:
            link.send(None)
            size = start.config.tensor_parallel_size
            store = FileStore(start.store, size)
            return ProcessRanks(store, start.rank, size, torch.device(start.config.device))

        try:
            kv = blocks_in(region, start.geometry)
            runner = load_rank(start.config, start.geometry, start.source, kv, start.rank, join)
        except (ModelError, ValueError) as error:
            link.send(str(error))
            return 1
        while True:
            runner.follow(link.recv())
    except EOFError:
        return 0


def end_with(descriptor: int) -> None:
    """End this process when the other end of the socket is closed, also in the middle of a collective."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP needs no asking
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
