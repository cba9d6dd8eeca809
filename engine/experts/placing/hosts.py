"""Copies of an expert on different hosts, so that the loss of a host loses no expert that has several. Pure.

A host is any name; None is the node's own. Copies there may stay together: when that host is lost, so is the node. An
expert is confined if it has several copies, and all of them are on one other host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Hosts = Sequence[str | None]
"""Of each rank."""


def confined(placed: Sequence[Sequence[int]], hosts: Hosts) -> set[int]:
    """The experts whose copies are lost together with one host."""
    copies, places = _places(placed, hosts)
    return {expert for expert, there in places.items() if copies[expert] > 1 and len(there) == 1 and None not in there}


def spread(placed: Sequence[Sequence[int]], loads: Sequence[float], hosts: Hosts) -> list[list[int]]:
    """`placed` with copies of confined experts swapped for those of others on other hosts, as long as each swap leaves
    fewer experts confined. No rank may have an expert twice, and none will. Of the swaps for an expert, the one after
    which the busier of both ranks has the least load."""
    found = [list(experts) for experts in placed]
    copies = Counter(expert for experts in found for expert in experts)
    each = {expert: loads[expert] / count for expert, count in copies.items()}
    while True:
        stuck = sorted(confined(found, hosts), key=lambda expert: (-each[expert], expert))
        swap = next((swap for expert in stuck if (swap := _swap(expert, found, each, hosts)) is not None), None)
        if swap is None:
            return found
        a, expert, b, other = swap
        found[a][found[a].index(expert)], found[b][found[b].index(other)] = other, expert


def _swap(
    expert: int, placed: Sequence[Sequence[int]], each: dict[int, float], hosts: Hosts
) -> tuple[int, int, int, int] | None:
    """(rank, the confined expert, rank of another host, an expert there that comes instead)."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(placed):
        for one in experts:
            holders.setdefault(one, []).append(rank)
    total = [sum(each[one] for one in experts) for experts in placed]
    best, least = None, float("inf")
    for a in holders[expert]:
        for b in (rank for rank, host in enumerate(hosts) if host != hosts[a]):
            for other in placed[b]:
                rest = [rank for rank in holders[other] if rank != b]
                if a in rest or (rest and all(hosts[rank] == hosts[a] for rank in rest)):
                    continue  # it would be there twice, or confined
                more = each[other] - each[expert]
                if (load := max(total[a] + more, total[b] - more)) < least:
                    best, least = (a, expert, b, other), load
    return best


def _places(placed: Sequence[Sequence[int]], hosts: Hosts) -> tuple[Counter[int], dict[int, set[str | None]]]:
    """(number of copies, hosts) of each expert."""
    copies: Counter[int] = Counter()
    places: dict[int, set[str | None]] = {}
    for host, experts in zip(hosts, placed, strict=True):
        for expert in experts:
            copies[expert] += 1
            places.setdefault(expert, set()).add(host)
    return copies, places
