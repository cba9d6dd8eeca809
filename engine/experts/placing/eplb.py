"""Decides which experts get more than one copy, and on which ranks the copies lie: DeepSeek's EPLB. Pure.

After the algorithm of https://github.com/deepseek-ai/EPLB (rebalance_experts), written again from its description:

    1. groups of experts are packed onto nodes, equally many per node (one node if the groups do not divide)
    2. on each node, experts get one copy each, and the expert with the largest load per copy gets one more, until the
       node's slots are used up
    3. the copies are packed onto the node's ranks, equally many per rank

Packing is greedy: the heaviest item first, to the lightest pack that has room. Ours adds `least`, the copies that every
expert gets in step 2 before any gets more, and `apart`: copies of one expert lie on different ranks, since two on one
rank die together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def rebalanced(
    loads: Sequence[float], copies: int, groups: int, nodes: int, ranks: int, least: int = 1
) -> list[list[int]]:
    """The experts of each rank, copies / ranks each, for the `loads` of experts in one layer. Needs: groups divides the
    experts, nodes divides the ranks, ranks divides copies, least * experts <= copies."""
    if groups % nodes:
        groups = nodes = 1
    size = len(loads) // groups
    by_group = [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]
    placed = []
    for on_node in packed(by_group, nodes):
        experts = [group * size + i for group in on_node for i in range(size)]
        chosen = replicated([loads[expert] for expert in experts], copies // nodes, ranks // nodes, least)
        counts = Counter(chosen)
        each = [loads[experts[i]] / counts[i] for i in chosen]
        placed += [[experts[chosen[i]] for i in pack] for pack in packed(each, ranks // nodes)]
    return placed


def replicated(loads: Sequence[float], copies: int, most: int, least: int = 1) -> list[int]:
    """Items, each as often as it has copies: `least` times all of them, then those that got more, in that order. An
    item gets more than `most` only when all others have as many."""
    chosen = [item for _ in range(least) for item in range(len(loads))]
    counts = [least] * len(loads)
    while len(chosen) < copies:
        open_items = [item for item in range(len(loads)) if counts[item] < most] or range(len(loads))
        heaviest = max(open_items, key=lambda item: loads[item] / counts[item])
        chosen.append(heaviest)
        counts[heaviest] += 1
    return chosen


def packed(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Items in each pack, equally many."""
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    filled: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min((pack for pack in range(packs) if len(filled[pack]) < room), key=total.__getitem__)
        filled[lightest].append(item)
        total[lightest] += weights[item]
    return filled


def apart(placed: Sequence[Sequence[int]], loads: Sequence[float]) -> list[list[int]]:
    """`placed`, if no rank has an expert twice; otherwise the same copies on other ranks so that none has. Possible if
    no expert has more copies than there are ranks.

    Experts in falling order of load per copy go to the ranks with the most room, of these to those with the least load.
    Always choosing the most room is what makes the last expert fit (Gale and Ryser's construction)."""
    if all(len(set(experts)) == len(experts) for experts in placed):
        return [list(experts) for experts in placed]
    counts = Counter(expert for experts in placed for expert in experts)
    room, total = [len(experts) for experts in placed], [0.0] * len(placed)
    found: list[list[int]] = [[] for _ in placed]
    for expert in sorted(counts, key=lambda expert: -loads[expert] / counts[expert]):
        ranks = sorted(range(len(placed)), key=lambda rank: (-room[rank], total[rank]))
        for rank in ranks[: counts[expert]]:
            found[rank].append(expert)
            room[rank] -= 1
            total[rank] += loads[expert] / counts[expert]
    return found
