"""The time of a prompt and of a token on this node beyond the model's own steps, learned from requests. Pure.

The cost models (engine/core/costs.py) predict the time of one step in the engine thread. A request also waits for what
happens between the steps: scheduling, hand-out of tokens, prompts between the decode steps, other prompts in its step.

    first token   t = c0 + c1 (estimated prefill)        from the first step of the prompt to its first token, without
                                                         the share of other prompts in its steps
    next token    t = c0 + c1 (decode step)              mean over some tokens of a running request

c0 and c1 are fitted like the cost models. A decode step counts as long as it took, so a machine that becomes slower
changes the step models only, not both. Prompts make few gaps between tokens long and leave the others short. The fit is
robust and would take the long ones for outliers, so it gets means over TOKENS gaps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from sched.cost import Regression

PROMPTS_WINDOW = 32
"""Number of prompts in the fit: prompts are rarer than steps, and the load that delays them changes."""

MAX_BEGUN = 4096
"""Prompts that have begun and not ended; aborted ones leave when newer ones need their place."""

TOKENS = 16
"""Number of gaps between tokens in one mean."""

PRIOR = (1e-3, 1.0)


class Served:
    """Feed it every step and every hand-out."""

    def __init__(self) -> None:
        self.first = Regression(PRIOR, PROMPTS_WINDOW)
        self.next = Regression(PRIOR)
        # request id -> begin, estimated seconds, seconds of other prompts
        self._begun: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        self._decoded: frozenset[str] = frozenset()  # requests of the last step with decodes
        self._decoded_at = 0.0
        self._gaps, self._gaps_s, self._steps_s = 0, 0.0, 0.0  # number and sums since the last mean

    # --- measurements

    def began(self, request_id: str, now: float, estimated_s: float) -> None:
        """A step computes a chunk of this prompt. Only the first call per request counts."""
        if request_id in self._begun:
            return
        self._begun[request_id] = now, estimated_s, 0.0
        while len(self._begun) > MAX_BEGUN:
            self._begun.popitem(last=False)

    def shared(self, request_id: str, seconds: float) -> None:
        """So much time of a step of this prompt went to other prompts."""
        if (begun := self._begun.get(request_id)) is not None:
            self._begun[request_id] = begun[0], begun[1], begun[2] + seconds

    def handed_out(self, request_id: str, now: float) -> None:
        """A token of the request leaves this node."""
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        begin, estimated_s, others_s = begun
        if now - others_s > begin:
            self.first.observe((1.0, estimated_s), now - begin - others_s)

    def decoded(self, requests: Collection[str], end: float, step_s: float, tokens: int) -> None:
        """A step that ended at `end` decoded `tokens` >= 1 tokens for these requests; `step_s`: the time of that step
        without its prompts. Requests that the last such step also decoded waited from its end to this one."""
        if not self._decoded.isdisjoint(requests):
            self._gaps += 1
            self._gaps_s += (end - self._decoded_at) * len(requests) / tokens
            self._steps_s += step_s
            if self._gaps == TOKENS:
                if self._gaps_s > 0:
                    self.next.observe((1.0, self._steps_s / TOKENS), self._gaps_s / TOKENS)
                self._gaps, self._gaps_s, self._steps_s = 0, 0.0, 0.0
        self._decoded, self._decoded_at = frozenset(requests), end

    def forget_prompts(self) -> None:
        """The estimates of prefills have changed: what first tokens take was learned with the old ones."""
        self.first = Regression(PRIOR, PROMPTS_WINDOW)
        self._begun.clear()

    # --- estimates

    def first_token_s(self, prefill_s: float) -> float:
        """Seconds from the first step of a prompt to its first token."""
        return self.first.estimate((1.0, prefill_s)) if self.first.observations else prefill_s

    def first_tokens_s(self, prompts: int, prefill_s: float) -> float:
        """Seconds until `prompts` prompts, which need `prefill_s` together, have their first tokens."""
        return self.first.estimate((float(prompts), prefill_s)) if self.first.observations else prefill_s

    def next_token_s(self, step_s: float) -> float:
        """Seconds between two tokens of a request."""
        return self.next.estimate((1.0, step_s)) if self.next.observations else step_s

    def prefill(self, coefficients: tuple[float, float, float]) -> tuple[float, float, float]:
        """The coefficients of a prefill model that predicts first_token_s instead of the steps alone."""
        if not self.first.observations:
            return coefficients
        c0, c1 = self.first.coefficients
        a0, a1, a2 = coefficients
        return c0 + c1 * a0, c1 * a1, c1 * a2
