"""One rank of scripts/bench.py collectives, as a program of others: it knows mooncake.pg and torch.

    python rank_program.py RANK SIZE STORE ROUNDS BYTES,BYTES,...

Gloo and ours take turns in the same processes and with the same tensors; who begins changes with each round. A round
is a barrier, then calls for about ROUND_S. The time of a call in a round is that of the slowest rank. Rank 0 prints a
list of [collective, bytes, {"ours": [s, ...], "gloo": [s, ...], "memcpy": [s, ...]}].
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import mooncake.pg  # noqa: F401  registers the backend

ROUND_S = 0.1
MOST_CALLS = 500


def calls(size: int, nbytes: int) -> dict[str, Callable[[Any], object]]:
    """Each collective on `nbytes` of float32 per rank: what goes in, and for all_gather what comes out."""
    count = max(size, nbytes // 4 // size * size)
    whole, other, part = torch.ones(count), torch.ones(count), torch.ones(count // size)
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "memcpy": lambda group: other.copy_(whole),
    }


def seconds(call: Callable[[Any], object], group: Any, repeats: int) -> float:
    dist.barrier(group=group)
    begun = time.perf_counter()
    for _ in range(repeats):
        call(group)
    return (time.perf_counter() - begun) / repeats


def measure(call: Callable[[Any], object], groups: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in groups}
    repeats = {}
    for name, group in groups.items():
        once = torch.tensor([max(seconds(call, group, 2), 1e-7)])
        dist.all_reduce(once, dist.ReduceOp.MAX)
        repeats[name] = max(1, min(MOST_CALLS, int(ROUND_S / once.item())))
    for number in range(rounds):
        for name, group in list(groups.items())[:: -1 if number % 2 else 1]:
            slowest = torch.tensor([seconds(call, group, repeats[name])], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[name].append(slowest.item())
    return found


def main(rank: int, size: int, store: str, rounds: int, sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size)
    groups = {"ours": dist.new_group(backend="mooncake"), "gloo": dist.group.WORLD}
    rows: list[Any] = [["barrier", 0, measure(lambda group: dist.barrier(group=group), groups, rounds)]]
    for nbytes in sizes:
        made = calls(size, nbytes)
        copies = measure(made.pop("memcpy"), {"memcpy": dist.group.WORLD}, rounds)
        rows += [[name, nbytes, measure(call, groups, rounds) | copies] for name, call in made.items()]
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), [int(n) for n in sys.argv[5].split(",")])
