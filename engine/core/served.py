"""The time of a prompt and of a token on this node beyond the model's own steps, learned from requests. Pure.

The cost models (engine/core/costs.py) predict the time of one step in the engine thread. A request also waits for what
happens between the steps: scheduling, hand-out of tokens, prompts between the decode steps, other prompts in its step.

    first token   t = c0 (steps) + c1 (estimated prefill)    from the first step of the prompt to its first token,
                                                             without the share of other prompts in its steps
    next token    t = c0 + c1 (decode step)                  mean over some tokens of a running request

c0 and c1 are fitted like the cost models. A machine that becomes slower changes the step models only, not both: a
decode step counts as long as it took, and the estimate of a prompt is that of the model which has learned from the
prompt's own steps. An estimate from before them would differ from prompt to prompt while the model learns, and the fit
would find that first tokens hardly depend on it. Prompts make few gaps between tokens long and leave the others short.
The fit is robust and would take the long ones for outliers, so it gets means over TOKENS gaps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import NamedTuple

from sched.cost import Regression

PROMPTS_WINDOW = 32
"""Number of prompts in the fit: prompts are rarer than steps, and the load that delays them changes."""

MAX_BEGUN = 4096
"""Prompts that have begun and not ended; aborted ones leave when newer ones need their place."""

TOKENS = 16
"""Number of gaps between tokens in one mean."""

PRIOR = (1e-3, 1.0)

Features = tuple[float, float, float]
"""Of the prefill model (sched/cost.py): steps, tokens, and tokens that see tokens."""


class _Begun(NamedTuple):
    """A prompt without a first token."""

    at: float  # when its first step began
    features: Features  # the sum over its chunks
    others_s: float  # that its steps spent on other prompts


class Served:
    """Feed it every step and every hand-out."""

    def __init__(self) -> None:
        self.first = Regression(PRIOR, PROMPTS_WINDOW)
        self.next = Regression(PRIOR)
        self._begun: OrderedDict[str, _Begun] = OrderedDict()  # by request id
        self._decoded: frozenset[str] = frozenset()  # requests of the last step with decodes
        self._decoded_at = 0.0
        self._gaps, self._gaps_s, self._steps_s = 0, 0.0, 0.0  # number and sums since the last mean

    # --- measurements

    def computed(self, request_id: str, begin: float, features: Features, others_s: float) -> None:
        """A step that began at `begin` computed a chunk of this prompt, with these features of the prefill model.
        `others_s`: the part of the step that went to other prompts."""
        begun = self._begun.get(request_id) or _Begun(begin, (0.0, 0.0, 0.0), 0.0)
        steps, tokens, pairs = (a + b for a, b in zip(begun.features, features, strict=True))
        self._begun[request_id] = _Begun(begun.at, (steps, tokens, pairs), begun.others_s + others_s)
        while len(self._begun) > MAX_BEGUN:
            self._begun.popitem(last=False)

    def lost(self, request_id: str, seconds: float) -> None:
        """A step gave way with this prompt, or left it out. Before its first step, a prompt has no time to lose."""
        if (begun := self._begun.get(request_id)) is not None:
            self._begun[request_id] = begun._replace(others_s=begun.others_s + seconds)

    def handed_out(self, request_id: str, now: float, prefill_s: Callable[[Features], float]) -> None:
        """A token of the request leaves this node. `prefill_s`: the prefill model, which has learned from its steps."""
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        took_s = now - begun.at - begun.others_s
        if took_s > 0:
            self.first.observe((begun.features[0], prefill_s(begun.features)), took_s)

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

    def first_tokens_s(self, steps: float, prefill_s: float) -> float:
        """Seconds until prompts have their first tokens that need `prefill_s` in this number of steps."""
        return self.first.estimate((steps, prefill_s)) if self.first.observations else prefill_s

    def next_token_s(self, step_s: float) -> float:
        """Seconds between two tokens of a request."""
        return self.next.estimate((1.0, step_s)) if self.next.observations else step_s

    def prefill(self, coefficients: tuple[float, float, float]) -> tuple[float, float, float]:
        """The coefficients of a prefill model that predicts first_tokens_s instead of the steps alone."""
        if not self.first.observations:
            return coefficients
        c0, c1 = self.first.coefficients
        a0, a1, a2 = coefficients
        return c0 + c1 * a0, c1 * a1, c1 * a2
