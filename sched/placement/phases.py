"""Rivals that put prefill and decode on the same nodes: the question is which node does how much of which.

windserve       prompts go to decode nodes while the prefill nodes are late
ecoserve        one node after the other takes prompts, and decodes the rest of the time
taichi          some nodes are good at prefill, the others at decode; every node does both

All of them ask every node, like the central schedulers that they stand for, and use the objectives of the request's
class (--slo). None moves KV between prefill nodes.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sched.admission import Limits
from sched.classes import CLASSES, Classes, ServiceClass
from sched.membership.member import Rng
from sched.placement.central import CentralGreedy
from sched.placement.costs import DecodeCosts, PrefillCosts, least
from sched.placement.links import Vector


class ByObjectives(CentralGreedy):
    """Knows the objectives of the classes. Each has rules of its own for nodes that do both, and no tolls."""

    tolls = False

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5, *, classes: Classes = CLASSES) -> None:
        super().__init__(limits, rng, threshold)
        self.classes = classes

    def objectives(self, costs: PrefillCosts | DecodeCosts) -> ServiceClass:
        """Those of the request."""
        return self.classes[costs.demand.service_class]


class WindServe(ByObjectives):
    """WindServe's dynamic prefill dispatch (ISCA 2025): a prompt that the prefill nodes cannot start in time goes to a
    decode node that has time for it.

    In time: the estimated TTFT keeps the objective. A decode node has time while its step is shorter than the objective
    of the time per token. Nodes of the role prefill are the prefill nodes, nodes of both roles the decode nodes.

    Kept: the dispatch by predicted TTFT. Left out: the separate GPU streams in which a decode node computes such a
    prompt next to its decodes (here it is cut into chunks by --batching-policy), and the rescheduling of running
    requests, which --migration balance does for every policy."""

    fetches = False

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        wanted, view = self.objectives(costs), costs.view
        own = [i for i in able if not view.decodes[i]]
        lent = [i for i in able if view.decodes[i] and (not own or view.step_s[i] < wanted.tbt_s)]
        best = least(costs.ttft_s, own)
        if not best or (lent and float(costs.ttft_s[best[0]]) > wanted.ttft_s):
            best = least(costs.ttft_s, own + lent)
        return self.drawn(best)


class EcoServe(ByObjectives):
    """EcoServe's routing inside a macro instance (arXiv 2504.18154, rolling activation and adaptive scheduling): the
    active node takes prompts as long as that breaks no promise, then the next one becomes active. So a node computes
    several prompts in a row, and then decodes undisturbed until its turn comes again.

    No promise is broken if the prompt gets its first token in time, if its KV fits, and if the running requests have
    saved enough time for its prefill: they were faster than the objective of the time per token. EcoServe tracks that
    for each request; records do not say it, so this keeps one account per node. It gains objective / step - 1 seconds
    per second of decode, up to what half of an answer saves, and pays for every prefill.

    Kept: the turns, the three conditions, decode where the prompt was computed. The phases in time are
    --batching-policy prefill-first. Left out: mitosis scaling, because the number of nodes is fixed here."""

    fetches = False

    def __init__(self, limits: Limits, rng: Rng, threshold: float = 1.5, *, classes: Classes = CLASSES) -> None:
        super().__init__(limits, rng, threshold, classes=classes)
        self.active = ""  # the node that took the last prompt
        self._accounts: dict[str, tuple[float, float]] = {}  # node -> (end of its prefill, seconds saved until then)
        self._source = 0

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        view = costs.view
        both = [i for i in able if view.decodes[i]] or able
        turn = next((place for place, i in enumerate(both) if view.ids[i] == self.active), 0)
        found = next((i for i in both[turn:] + both[:turn] if self._kept(costs, i)), None)
        self._source = self.drawn(least(costs.ttft_s, both)) if found is None else found
        self.active = view.ids[self._source]
        end_s, left_s = costs.now + float(costs.wait_s[self._source]), self._saved_s(costs, self._source)
        own_s = float(costs.own_s[self._source])
        self._accounts[self.active] = end_s + own_s, left_s - own_s
        return self._source

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        return self._source if self._source in able else super().choose_decode(costs, able)

    def _kept(self, costs: PrefillCosts, i: int) -> bool:
        """Whether the prompt on node `i` breaks no promise."""
        if costs.ttft_s[i] > self.objectives(costs).ttft_s or costs.view.free_blocks[i] < costs.demand.num_blocks:
            return False
        return not costs.view.running[i] or self._saved_s(costs, i) >= float(costs.own_s[i])

    def _saved_s(self, costs: PrefillCosts, i: int) -> float:
        """Seconds that the requests on node `i` will have saved when its queue is computed."""
        view, tbt_s = costs.view, self.objectives(costs).tbt_s
        step_s = max(float(view.step_s[i]), 1e-6)
        most_s = (tbt_s - step_s) * costs.demand.output_tokens / 2
        end_s, left_s = self._accounts.get(view.ids[i], (costs.now, most_s))
        unpaid_s = max(0.0, float(costs.wait_s[i]) - max(0.0, end_s - costs.now))
        decoded_s = max(0.0, costs.now - end_s)
        return min(most_s, left_s + decoded_s * (tbt_s / step_s - 1)) - unpaid_s


LIGHT_CHUNK_TOKENS = 256
"""Prompt tokens in a step of a decode-heavy node: the default of --prefill-chunk-tokens."""

HEAVY_SHARE = 0.5
"""Of the nodes that do both."""


def prefill_heavy(ids: Collection[str]) -> set[str]:
    """The prefill-heavy ones of these nodes, which do both: the first HEAVY_SHARE of them by length of id and id, so
    that node-2 is before node-10; at least one, and not all of several."""
    return set(sorted(ids, key=lambda name: (len(name), name))[: max(1, int(HEAVY_SHARE * len(ids)))])


class TaiChi(ByObjectives):
    """TaiChi's hybrid mode (arXiv 2508.01989, length-aware prefill scheduling and flowing decode scheduling): every
    node does both; prefill-heavy nodes have large chunks, decode-heavy ones small chunks.

    A prompt goes to a decode-heavy node if it is short enough to get its first token there in time, in steps of
    LIGHT_CHUNK_TOKENS next to the decodes; so the prefill-heavy nodes keep their time for the long ones. A request
    decodes on a decode-heavy node while one has room and keeps the objective of the time per token, else anywhere.

    Which node is which follows from the ids (`prefill_heavy`); start them with --batching-policy mixed and their
    --prefill-chunk-tokens. Kept: both kinds and both rules. Left out: the flow back, in which a running request that
    has time to spare moves to a prefill-heavy node; the search for the best three sliders."""

    fetches = False

    def choose_prefill(self, costs: PrefillCosts, able: list[int]) -> int:
        light = self._light(costs, able)
        first_s = self._among_decodes_s(costs)
        kept = [i for i in light if first_s[i] <= self.objectives(costs).ttft_s]
        if kept:
            return self.drawn(least(first_s, kept))
        return self.drawn(least(costs.ttft_s, [i for i in able if i not in light] or able))

    def choose_decode(self, costs: DecodeCosts, able: list[int]) -> int:
        light = self._light(costs, able)
        calm = [i for i in light if costs.headroom[i] >= 0 and costs.token_s[i] <= self.objectives(costs).tbt_s]
        return self.drawn(least(costs.decode_s, calm)) if calm else super().choose_decode(costs, able)

    def _light(self, costs: PrefillCosts | DecodeCosts, able: list[int]) -> list[int]:
        """The decode-heavy ones of `able`."""
        view = costs.view
        both = view.prefills & view.decodes
        heavy = prefill_heavy([view.ids[i] for i in np.flatnonzero(both).tolist()])
        return [i for i in able if both[i] and view.ids[i] not in heavy]

    def _among_decodes_s(self, costs: PrefillCosts) -> Vector:
        """Seconds to the first token in steps of LIGHT_CHUNK_TOKENS, each with one token of every running request."""
        chunks = np.ceil((costs.demand.num_tokens - costs.local) / LIGHT_CHUNK_TOKENS)
        seconds: Vector = costs.wait_s + costs.own_s + chunks * np.where(costs.view.running > 0, costs.view.step_s, 0.0)
        return seconds
