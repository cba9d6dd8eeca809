"""The process of a rank above 0 on the node's host: it loads its share of the experts, then answers rank 0.

Started by processes.py with the descriptor of a socket pair as its only argument. It ends when that socket closes,
whatever it is doing then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from engine.core.priority import step_back
from engine.experts.loading import LOADING, Start, fill, telling
from engine.experts.share import Share
from engine.experts.work import Work
from engine.model.model_error import ModelError
from engine.observe import logs
from net.rounds.desk import Desk, Heart, desk_bytes
from net.transfer.common.memory import Region

LOOK_S = 5.0


def main(descriptor: int) -> int:
    # Signals to the whole process group are for rank 0: it closes the socket when it has finished its step.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(descriptor,), daemon=True).start()
    link = Connection(descriptor)
    try:
        start: Start = link.recv()
        config, duty, plan = start.config, start.duty, start.duty.plan
        logs.configure(config.log_level, config.log_format, node_id=config.node_id, rank=duty.rank)
        step_back(config.engine_nice)  # before any thread of the model starts
        torch.set_num_threads(max(1, config.num_threads // plan.local))
        torch.set_grad_enabled(False)
        regions = [Region.attach(f"experts of rank {i}", fd, plan.share_bytes) for i, fd in enumerate(start.memfds)]
        shares = {rank: Share(region, plan) for rank, region in enumerate(regions)}
        desk = Desk(Region.attach("desk", start.desk, desk_bytes(plan.layout)), plan.layout)
        bell = Region.attach("bell", start.bell, os.fstat(start.bell).st_size)
        try:
            fill(duty, start.source, shares, progress=telling(lambda: link.send(LOADING)), given=start.given)
        except (ModelError, ValueError) as error:
            link.send(str(error))
            return 1
        work = Work(desk, duty.rank, shares)
        with Heart(desk):
            link.send(None)
            while True:
                if (message := desk.next_message(LOOK_S)) is not None:
                    work.do(message.head)
                    desk.answered(message.number, bell)
    except EOFError:
        return 0


def end_with(descriptor: int) -> None:
    """End this process when the other end of the socket is closed, also in the middle of a product."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP needs no asking
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
