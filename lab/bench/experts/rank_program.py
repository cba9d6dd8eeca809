"""One rank of scripts/bench.py experts: it answers every message at once.

    python -m lab.bench.experts.rank_program RANK RANKS STORE ROUNDS CASE [CASE ...]

A case is TOKENS,HIDDEN,EXPERTS,TOP_K. Rank 0 has all tokens, as in a node with --expert-parallel-size. Ours: one
message to each other rank through its desk, an answer with as many rows, and the sum per token. Gloo: the same rows by
all_to_all_single with the counts known before, back by another one, and the sum per token by torch. memcpy: the bytes
of both ways, copied once by one thread. All three move the same bytes: rows for experts of rank 0 itself go nowhere,
and none of them counts or moves them. The contenders take turns, in an order that rotates with each round. Rank 0
prints a list of [case, {"ours": [s, ...], "gloo": [s, ...], "memcpy": [s, ...]}, bytes of both ways].
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from net.rounds import native
from net.rounds.desk import Desk, await_answers, desk_bytes, new_bell, new_region
from net.rounds.layout import PAGE, TYPES, Layout
from net.transfer.common.memory import Region

ROUND_S = 0.1
MOST_CALLS = 300
DTYPE = torch.bfloat16


class Ours:
    """Rank 0's side. The ranks are found by descriptors of this process, /proc/PID/fd."""

    def __init__(self, layout: Layout, ranks: int, experts: int, x: Tensor, chosen: Tensor, weights: Tensor) -> None:
        self.bell = new_bell("bell")
        self.regions = [new_region(f"desk {rank}", layout) for rank in range(1, ranks)]
        self.desks = [Desk(region, layout) for region in self.regions]
        self.out, self.chosen, self.x, self.weights = torch.empty_like(x), chosen, x, weights
        self.table = torch.arange(experts, dtype=torch.int32)
        self.sent = torch.empty(chosen.shape, dtype=torch.int32)
        self.own = Region.private("own", desk_bytes(layout))  # for the pairs of rank 0
        self.tokens = [torch.zeros(layout.most_rows, dtype=torch.int32) for _ in range(ranks)]
        self.d = d = native.Dispatch()
        messages = [self.own.address + PAGE, *(desk.message for desk in self.desks)]
        for rank, (message, memory) in enumerate(zip(messages, self.tokens, strict=True)):
            d.desks[rank], d.tokens[rank] = message, memory.data_ptr()
        d.x, d.chosen, d.weights = x.data_ptr(), chosen.data_ptr(), weights.data_ptr()
        d.table, d.sent, d.num_tokens = self.table.data_ptr(), self.sent.data_ptr(), len(x)
        d.hidden, d.top_k, d.columns, d.slots, d.ranks = layout.hidden, layout.top_k, 1, experts // ranks, ranks
        d.at_scales, d.at_pair_rows = layout.at_scales, layout.at_pair_rows
        d.at_pair_slots, d.at_pair_weights = layout.at_pair_slots, layout.at_pair_weights
        d.type, d.own = TYPES.index(layout.dtype), 0
        self.answers = (ctypes.c_void_p * ranks)(None, *(desk.answer for desk in self.desks))

    def __call__(self) -> None:
        library = native.library()
        library.mr_dispatch(ctypes.addressof(self.d))
        asked = [desk for rank, desk in enumerate(self.desks, 1) if self.d.rows[rank]]
        for rank, desk in enumerate(self.desks, 1):
            if self.d.rows[rank]:
                desk.ask(0, 0, self.d.rows[rank], self.d.pairs[rank])
        while asked and not all(await_answers(asked, self.bell, 10.0)):
            pass
        library.mr_combine(ctypes.addressof(self.d), self.answers, None, self.out.data_ptr(), self.d.type)

    def told(self) -> list[str]:
        pid = os.getpid()
        return [f"/proc/{pid}/fd/{region.memfd}" for region in (*self.regions, self.bell)]


def serve(desk: Desk, bell: Region, stop: threading.Event) -> None:
    """Answer every message at once, in another thread of this rank. The rows of the answer are there already: products
    write them where they lie."""
    while not stop.is_set():
        if (message := desk.next_message(0.2)) is not None:
            desk.answered(message.number, bell)


def gloo(rank: int, counts: list[int], x: Tensor, rows: list[Tensor]) -> Callable[[], object]:
    """Rows go to their ranks, and come back; rank 0 adds them up. `rows`: per rank the tokens of its rows."""
    hidden, ranks = x.shape[1], len(counts)
    mine = counts[rank]
    got = torch.empty(mine, hidden, dtype=x.dtype)
    nothing = torch.empty(0, hidden, dtype=x.dtype)
    none = [0] * ranks
    from_root = [mine, *none[1:]]

    def root() -> None:
        given = torch.cat([x[of_rank] for of_rank in rows])
        back = torch.empty_like(given)
        dist.all_to_all_single(got, given, from_root, counts)
        dist.all_to_all_single(back, got, counts, from_root)
        total = torch.zeros(x.shape)
        for of_rank, part in zip(rows, back.split(counts), strict=True):
            total.index_add_(0, of_rank, part.float())
        total.to(x.dtype)

    def other() -> None:
        dist.all_to_all_single(got, nothing, from_root, none)
        dist.all_to_all_single(nothing, got, none, from_root)

    return root if rank == 0 else other


def seconds(call: Callable[[], object], repeats: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def measure(rank: int, calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Of rank 0. What only rank 0 does is a call of nothing on the others, in which their other thread answers."""
    repeats, found = dict[str, int](), dict[str, list[float]]()
    for name, call in calls.items():
        once = torch.tensor([max(seconds(call, 2), 1e-7)])
        dist.broadcast(once, 0)
        repeats[name] = max(1, min(MOST_CALLS, int(ROUND_S / once.item())))
        found[name] = []
    names = list(calls)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(seconds(calls[name], repeats[name]))
    return found


def case(rank: int, ranks: int, rounds: int, text: str) -> list[Any]:
    tokens, hidden, experts, top_k = map(int, text.split(","))
    torch.manual_seed(1)
    x = torch.randn(tokens, hidden).to(DTYPE)
    chosen = torch.rand(tokens, experts).topk(top_k).indices
    weights = torch.rand(tokens, top_k)
    owner = chosen // (experts // ranks)
    rows = [(owner == one).any(1).nonzero()[:, 0] for one in range(ranks)]
    rows[0] = rows[0][:0]
    counts = [len(of_rank) for of_rank in rows]
    layout = Layout(tokens, hidden, top_k, str(DTYPE).removeprefix("torch."))
    names: list[Any] = [None]
    ours = Ours(layout, ranks, experts, x, chosen, weights) if rank == 0 else None
    if ours is not None:
        names = [ours.told()]
    dist.broadcast_object_list(names, 0)
    stop = threading.Event()
    thread, regions = None, list[Region]()
    if rank:
        for path, nbytes in ((names[0][rank - 1], desk_bytes(layout)), (names[0][-1], PAGE)):
            regions.append(Region.attach("of rank 0", os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes))
        thread = threading.Thread(target=serve, args=(Desk(regions[0], layout), regions[1], stop))
        thread.start()
    away = sum(counts[1:])
    source, target = torch.ones(max(1, away), hidden, dtype=DTYPE), torch.empty(max(1, away), hidden, dtype=DTYPE)

    def copied() -> None:
        for _ in range(2):
            target.copy_(source)

    idle: Callable[[], object] = lambda: None  # noqa: E731
    calls = {
        "ours": idle if ours is None else ours,
        "gloo": gloo(rank, counts, x, rows),
        "memcpy": idle if rank else copied,
    }
    dist.barrier()
    found = measure(rank, calls, rounds)
    dist.barrier()
    stop.set()
    if thread is not None:
        thread.join()
    for region in regions if ours is None else [*ours.regions, ours.bell, ours.own]:
        region.close()
    return [text, found, 2 * away * hidden * DTYPE.itemsize]


def main(rank: int, ranks: int, store: str, rounds: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = [case(rank, ranks, rounds, text) for text in cases]
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
