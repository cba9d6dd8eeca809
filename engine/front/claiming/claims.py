"""Announces a prompt's work to its prefill node before the prompt arrives there.

Acceptors that decide at the same moment see each other's claims in the counter that `reserve` returns. If others
claimed work in between, the acceptor decides again with their work added, and may choose the runner-up
(reference/scheduling.md section 4, step 5).
"""

from __future__ import annotations

from collections.abc import Mapping

from net.gossip.load_words import UNREACHABLE, Claim, LoadWords
from sched.gossip.load_word import CLAIM_MAX, CLAIM_UNIT_S
from sched.placement.burst import Choice
from sched.placement.choice import Placement, Rejected

MAX_RUNNERS_UP = 2
MAX_RIVAL_SHARE = 0.2
"""The acceptor decides again if others have claimed more work in between than this share of the estimated time to
first token."""

LEAST_ANNOUNCED_S = 0.005
"""The acceptor does not announce less work than this, because the question takes as long."""


class Claims:
    """The claims of one acceptor."""

    def __init__(self, words: LoadWords) -> None:
        self._words = words

    async def secure(
        self, decision: Placement, choice: Choice, claimed: Mapping[str, int]
    ) -> tuple[Placement, Claim | None, int]:
        """(the final decision, its claim, how often the acceptor decided again). `claimed`: the counter of each node
        when it was asked; `choice`: the inputs of the decision."""
        given_up = 0
        while True:
            work_s = decision.estimates["prefill_s"]
            if work_s < LEAST_ANNOUNCED_S or decision.prefill not in claimed:
                return decision, None, given_up
            try:
                claim = await self._words.reserve(decision.prefill, max(1, int(min(work_s / CLAIM_UNIT_S, CLAIM_MAX))))
            except UNREACHABLE:
                return decision, None, given_up  # sending the prompt will show whether the node is alive
            between_s = (claim.previous - claimed[decision.prefill]) * CLAIM_UNIT_S
            if given_up == MAX_RUNNERS_UP or between_s <= MAX_RIVAL_SHARE * decision.estimates["ttft_s"]:
                return decision, claim, given_up
            choice.announced(decision.prefill, between_s)
            again = choice.decide()
            if isinstance(again, Rejected) or again.prefill == decision.prefill:
                return decision, claim, given_up
            await self._words.release(claim)
            decision, given_up = again, given_up + 1
