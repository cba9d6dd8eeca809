"""Intra-node disaggregation: a prefill half and a decode half share the compute of one node.

Nexus (arXiv 2507.06608, SM partitioning by a cost model) and semi-PD (arXiv 2504.19867, disaggregated computation and
unified storage) give each phase some of a GPU's multiprocessors. Both phases run at the same time and use the same KV,
so nothing moves between them. Here prefill-3 and decode-3 are the halves of one node, and each has half of its KV
memory:

    prefill step   takes 1 / share times as long while the other half computes: it is bound by compute
    decode step    takes SATURATION / (1 - share) times as long, at least once: it is bound by memory, and more
                   multiprocessors than SATURATION of them do not make it faster

A half that is alone has the whole GPU: the border moves at once and for nothing, which is better than either paper.
Left out: one memory for both halves, of which each may use what the other one leaves; the search for the share, which
is a setting here (--prefill-share); contention for memory bandwidth; the order of prompts by length. Nodes cannot do
this, because two phases of one process run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.simulator.models.contention import Sharing
from sched.placement.central import CentralGreedy
from sched.placement.costs import DecodeCosts, PrefillCosts, least

SATURATION = 0.5
"""Share of the multiprocessors from which a decode step gets no faster. The papers show curves that flatten, and no
number for this model: an assumption."""


class Halves:
    """The halves of all nodes: the first `count` nodes are the prefill halves, the next `count` the decode halves."""

    def __init__(self, share: float, nodes: Sequence[Sharing], count: int) -> None:
        """share: of prefill while both compute; 0 = every node has its own GPU. Raises ValueError naming the flag."""
        if share and len(nodes) != 2 * count:
            raise ValueError("--prefill-share needs as many --decode halves as --prefill halves, and no --mixed node")
        self._share, self._nodes, self._count = share, nodes, count
        self._computing = [False] * len(nodes)

    def together(self, one: int, other: int) -> bool:
        """Whether both are halves of the same node."""
        return bool(self._share) and self._other(one) == other

    def slowness(self, index: int) -> float:
        """The factor of a step of that half that begins now."""
        if not self._share or not self._computing[self._other(index)]:
            return 1.0
        return 1 / self._share if index < self._count else max(1.0, SATURATION / (1 - self._share))

    def changed(self, index: int) -> None:
        """That half may have started or stopped computing: the next steps of the other one have another length."""
        now = self._nodes[index].computing
        if self._share and now != self._computing[index]:
            self._computing[index] = now
            self._nodes[self._other(index)].disturb()

    def _other(self, index: int) -> int:
        return index + self._count if index < self._count else index - self._count


def other_half(name: str) -> str:
    """prefill-3 -> decode-3"""
    return name.replace("prefill-", "decode-")


class Nexus(CentralGreedy):
    """Least TTFT among the nodes whose decode half has room; decode on the same node."""

    fetches, tolls = False, False
    _chosen = ""

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        view, need = costs.view, costs.demand.num_blocks
        halves = {i: view.index.get(other_half(view.ids[i])) for i in able}
        roomy = [i for i, half in halves.items() if half is not None and view.free_blocks[half] >= need]
        chosen = self.drawn(least(costs.ttft_s, roomy or able))
        self._chosen = view.ids[chosen]
        return chosen

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        half = costs.view.index.get(other_half(self._chosen))
        if half is not None and half in able:
            return half
        return super().choose_decode(costs, able)
