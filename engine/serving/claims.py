"""Announce a prompt's work to its prefill node before the prompt itself is there.

Acceptors that decide at the same moment see each other's claims in the counter that reserving returns: whoever finds
that others came in between decides again with their work added, and may take the runner-up (reference/scheduling.md
section 4, step 5).
"""

from __future__ import annotations

from collections.abc import Mapping

from net.load_words import UNREACHABLE, Claim, LoadWords
from sched.load_word import CLAIM_MAX, CLAIM_UNIT_S
from sched.placements.burst import Choice
from sched.placements.choice import Placement, Rejected

MOST_RUNNERS_UP = 2
CAME_BETWEEN = 0.2
"""Share of the estimated time to first token that others may have claimed meanwhile before the choice is made anew."""

LEAST_S = 0.005
"""Less work than this is not announced: asking takes as long."""


class Claims:
    """Of one acceptor."""

    def __init__(self, words: LoadWords) -> None:
        self._words = words

    async def secure(
        self, decision: Placement, choice: Choice, claimed: Mapping[str, int]
    ) -> tuple[Placement, Claim | None, int]:
        """(the decision that stands, its claim, how often the choice was given up). `claimed`: each node's counter when
        it was asked; `choice` is what led to the decision."""
        given_up = 0
        while True:
            work_s = decision.estimates["prefill_s"]
            if work_s < LEAST_S or decision.prefill not in claimed:
                return decision, None, given_up
            try:
                claim = await self._words.reserve(decision.prefill, max(1, int(min(work_s / CLAIM_UNIT_S, CLAIM_MAX))))
            except UNREACHABLE:
                return decision, None, given_up  # sending the prompt will tell
            between_s = (claim.previous - claimed[decision.prefill]) * CLAIM_UNIT_S
            if given_up == MOST_RUNNERS_UP or between_s <= CAME_BETWEEN * decision.estimates["ttft_s"]:
                return decision, claim, given_up
            choice.announced(decision.prefill, between_s)
            again = choice.decide()
            if isinstance(again, Rejected) or again.prefill == decision.prefill:
                return decision, claim, given_up
            await self._words.release(claim)
            decision, given_up = again, given_up + 1
