"""Speculative decoding: the number of draft tokens per row, and which of them are accepted. Pure.

A step computes the last known token of a request together with the k draft tokens after it, and the sampler chooses a
token after each of them. Drafts are accepted while they equal the chosen tokens; the first different choice (or the
one after the whole draft) is also kept, so a step yields 1 to k + 1 tokens.

Acceptance by the same draw (lookups; greedy; draft models with --speculative-acceptance same-draw) gives the same
tokens. engine/sampling/sampler.py chooses the token at position i as x_i = S(logits after x_<i, params, seed, i), S
deterministic: the random numbers of (seed, i) decide the draw. Let d be the draft and
y_j = S(logits after x_<i d_<j, params, seed, i + j). y_0 = x_i always. While y_l = d_l for all l < j, y_j is chosen
from the logits after the true history, so y_j = x_(i+j). The kept tokens y_0 .. y_m, with m the first mismatch, are
x_i .. x_(i+m): the request's tokens without speculation, for any proposer, up to the rounding of another batch shape.
Penalties and min_tokens count the drafts before a position as output.

The rejection rule (rejection.py; draft models, mtp and eagle by default) keeps the distribution, not the tokens, and
accepts with probability sum_x min(p(x), q(x)), the maximum for any rule. Compared with it, the same draw

    lookups       are as good: q is one token d, both accept with probability p(d);
    greedy        is as good: both accept if the argmax agrees;
    draft model   is a little worse: the draft takes part in a race of its own weights with the same random numbers
                  (engine/sampling/race.py). Measured on two texts with the embedded model; its draft lacked 1, 2 or 4
                  of its 30 layers: at temperature 1, 0.59, 0.52 and 0.25 instead of the rejection rule's 0.68, 0.60 and
                  0.32; at 0.7, 0.62, 0.54 and 0.27 instead of 0.67, 0.59 and 0.32.

Number of drafts (--speculative-length auto). Let a be a request's estimated chance that a draft token is right if all
earlier ones are; then draft j is right with probability a^j. The depth with the most expected tokens per second is
chosen; the cost of verification is learnt from the node's own steps (engine/core/costs.py; goodput, as in Liu et
al., arXiv 2406.14066). Large batches and requests whose drafts keep failing thus turn speculation off. Some steps run
without drafts for comparison: the first few, then one in sixty-four (with states two, of which the second is plain). If
the model keeps states, the next step computes accepted drafts again, so each of these costs two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.step.block_book import BlockBook
from engine.step.request import Request
from engine.step.step import ScheduledRow

INDEX_TOKENS_PER_STEP = 1024
"""About 1.5 ms on the event loop; a longer prompt is indexed over several steps."""

PRIOR_RATE = 0.6
PRIOR_WEIGHT = 2.0
FORGET_TRIED = 0.95
FORGET_IDLE = 0.98
"""A request whose drafts failed gets drafts again after about fifty steps without any: its text may have changed."""

FORGET_OVERALL = 0.995
"""Per verified row and per idle step: the prior of a new request is learnt from about two hundred rows."""


CALIBRATE_STEPS = 6
CALIBRATE_EVERY = 64


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """Seconds of a decode step without drafts, and the additions of the first draft, of each row with one, and of each
    draft token."""

    plain: float
    step: float
    row: float
    token: float


def accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """The number of leading drafts that equal the chosen tokens; the caller keeps chosen[:accepted + 1]."""
    return next((j for j, token in enumerate(draft) if chosen[j] != token), len(draft))


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft token is right if all earlier ones are: of a request, or of the whole node."""

    tried: float = FORGET_TRIED
    unused: float = FORGET_IDLE
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, drafted: int, right: int) -> None:
        """Counts tokens up to the first wrong one; nothing is known about later ones."""
        self.hits = self.tried * self.hits + right
        self.tries = self.tried * self.tries + min(drafted, right + 1)

    def idle(self) -> None:
        self.hits *= self.unused
        self.tries *= self.unused

    def rate(self, prior: float = PRIOR_RATE) -> float:
        return (self.hits + prior * PRIOR_WEIGHT) / (self.tries + PRIOR_WEIGHT)


@dataclass(slots=True)
class _Request:
    """The speculator's state of one running request."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    index: Index | None = None
    request: Request | None = None  # with `index`


@dataclass(slots=True)
class Totals:
    """Counts since the start of the node."""

    decoded: int = 0  # rows, with a draft or without
    steps: int = 0  # verified rows: those with a draft
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)

    def add(self, drafted: int, right: int) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += right
        for j in range(right):
            self.per_position[j] += 1


class Index(Protocol):
    """The text of one request (ngram.py, suffix.py)."""

    def extend(self, tokens: Sequence[int], limit: int) -> int:
        """Index at most `limit` more of these tokens, which are the whole text; returns their number."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow."""


class Lookups(Protocol):
    """Makes the indexes of the requests, and may learn from requests that have ended."""

    def of(self, root: bytes) -> Index:
        """For a new request. root: of the request's keys."""

    def ended(self, root: bytes, output: Sequence[int]) -> None:
        """These tokens were the output of a request."""

    def catch_up(self, limit: int) -> int:
        """Index at most `limit` tokens of requests that have ended; returns their number."""


class Proposer(Protocol):
    """A draft model (draft.py), or a further layer of the target (layer_drafts.py)."""

    step_seconds: float  # of one draft token of every row

    def forget(self, request_id: str) -> None:
        """The request has ended."""


class Speculator:
    """Plans and counts the drafts of each step.

    method: the name, for /debug/state. lookups: fill the drafts here; None: this only sets the number of tokens for
    `draft`. verify_cost(rows, context): of a step with `rows` decodes over `context` tokens of
    KV in total. length: "auto", or "fixed": always the maximum."""

    def __init__(
        self,
        method: str,
        num_tokens: int,
        lookups: Lookups | None,
        length: str,
        max_model_len: int,
        verify_cost: Callable[[int, int], VerifyCost],
        draft: Proposer | None = None,
    ) -> None:
        self.method = method
        self.totals = Totals(per_position=[0] * num_tokens)
        self._num_tokens = num_tokens
        self._lookups = lookups
        self._length = length
        self._max_model_len = max_model_len
        self._verify_cost = verify_cost
        self._draft = draft
        self._num_steps = 0  # with decodes
        self._overall = Acceptance(FORGET_OVERALL, FORGET_OVERALL)
        self._requests: dict[str, _Request] = {}

    # --- before a step

    def plan(self, rows: Sequence[ScheduledRow], budget: int, blocks: BlockBook) -> None:
        """Give decoding rows drafts from the remaining resources: `budget` tokens and the pool's free blocks. A draft
        never preempts a request."""
        plain = [row for row in rows if not row.request.handover and row.request.cold is None]
        decodes = [row for row in plain if row.samples and row.decodes]
        left_to_index = INDEX_TOKENS_PER_STEP
        wanted: list[tuple[ScheduledRow, list[int], int]] = []
        for row in decodes:
            most = self._most(row.request)
            draft: list[int] = []
            if self._lookups is not None and most > 0:
                draft, used = self._look_up(self._lookups, row.request, most, left_to_index)
                left_to_index -= used
                most = len(draft)
            wanted.append((row, draft, most))
        if self._lookups is not None:
            self._lookups.catch_up(left_to_index)
        counts = self._lengths([most for *_, most in wanted], decodes, blocks.keeps_states)
        for (row, draft, _), count in zip(wanted, counts, strict=True):
            count = min(count, budget, self._room(row, blocks))
            if count <= 0:
                self._of(row.request).acceptance.idle()
                continue
            blocks.extend(row.request, 1 + count, drafts=count)
            row.num_tokens, row.num_drafts, row.draft = row.num_tokens + count, count, draft[:count]
            budget -= count
        if not any(counts):
            self._overall.idle()

    def _most(self, request: Request) -> int:
        """The most drafts such that they and the token after them stay within the request's limits."""
        left = min(request.sampling.max_tokens - request.num_output_tokens, self._max_model_len - request.num_tokens)
        return max(0, min(self._num_tokens, left - 1))

    def _room(self, row: ScheduledRow, blocks: BlockBook) -> int:
        """The number of draft tokens that fit into the request's last block and the free blocks."""
        free = blocks.pool.num_free // (1 + len(row.request.others))  # a block in every group
        slots = (len(row.request.block_ids) + free) * blocks.block_size
        return slots - row.start - row.num_tokens

    def _look_up(self, lookups: Lookups, request: Request, most: int, limit: int) -> tuple[list[int], int]:
        """(draft, tokens indexed for it)."""
        state = self._of(request)
        if state.index is None:
            state.index, state.request = lookups.of(request.root), request
        used = state.index.extend(request.token_ids, limit)
        return state.index.propose(request.token_ids, most), used

    def _of(self, request: Request) -> _Request:
        return self._requests.setdefault(request.request_id, _Request())

    def _lengths(self, most: Sequence[int], rows: Sequence[ScheduledRow], again: bool) -> list[int]:
        """The number of drafts of each row, at most `most`. again: whether accepted ones are computed again."""
        if self._length == "fixed" or not rows:
            return list(most)
        self._num_steps += 1
        phase = self._num_steps % CALIBRATE_EVERY
        if self._num_steps <= CALIBRATE_STEPS or phase == 0 or (again and phase == CALIBRATE_EVERY - 1):
            return [0] * len(most)
        prior = self._overall.rate()
        rates = [self._of(row.request).acceptance.rate(prior) for row in rows]
        context = sum(row.start + 1 for row in rows)
        draft_s = 0.0 if self._draft is None else self._draft.step_seconds
        return goodput_lengths(most, rates, self._verify_cost(len(rows), context), draft_s, again)

    # --- after a step

    def decoded(self, request: Request) -> None:
        """A step computed the last known token of this request, with drafts or without."""
        self.totals.decoded += not request.handover  # on its prefill node it gets no drafts and decodes nothing

    def verified(self, request: Request, drafted: int, right: int) -> None:
        """`right` of `drafted` tokens were accepted."""
        self.totals.add(drafted, right)
        self._overall.observe(drafted, right)
        if (state := self._requests.get(request.request_id)) is not None:
            state.acceptance.observe(drafted, right)

    def forget(self, request_id: str) -> None:
        """The request has ended here."""
        state = self._requests.pop(request_id, None)
        if state is not None and state.request is not None and self._lookups is not None:
            self._lookups.ended(state.request.root, state.request.output_ids)
        if self._draft is not None:
            self._draft.forget(request_id)

    def state(self) -> dict[str, Any]:
        """For /debug/state."""
        totals = self.totals
        return {
            "method": self.method,
            "decode_rows": totals.decoded,
            "verified_rows": totals.steps,
            "draft_tokens": totals.drafted,
            "accepted_tokens": totals.accepted,
            "acceptance_rate": totals.accepted / totals.drafted if totals.drafted else None,
            "accepted_per_position": list(totals.per_position),
            "requests": len(self._requests),
        }


def goodput_lengths(
    most: Sequence[int], rates: Sequence[float], cost: VerifyCost, draft_seconds: float = 0.0, again: bool = False
) -> list[int]:
    """Draft lengths, at most `most`, by the rule in the module's docstring. draft_seconds: of one draft token for all
    rows. again: whether accepted drafts are computed again."""
    best = [0] * len(most)
    plain = best_speed = len(most) / cost.plain
    for depth in range(1, max(most, default=0) + 1):
        counts = [_worth(min(depth, limit), rate, plain, cost, again) for limit, rate in zip(most, rates, strict=True)]
        gain = sum(_expected(rate, count) for rate, count in zip(rates, counts, strict=True))
        extra = cost.step + cost.row * sum(map(bool, counts)) + cost.token * (sum(counts) + gain * again)
        speed = (len(most) + gain) / (cost.plain + extra + draft_seconds * max(counts))
        if speed > best_speed:
            best, best_speed = counts, speed
    return best


def _worth(limit: int, rate: float, plain: float, cost: VerifyCost, again: bool) -> int:
    """The length for one row, at most `limit`, whose gain exceeds its cost at `plain` tokens/s without drafts."""
    price, count = plain * cost.token, 0
    left = 1 - price * again  # of an accepted draft, after the step that computes it again
    while count < limit and rate ** (count + 1) * left > price:
        count += 1
    return count if _expected(rate, count) * left > plain * cost.row + price * count else 0


def _expected(rate: float, count: int) -> float:
    """The expected number of tokens that `count` drafts add."""
    return sum(rate**j for j in range(1, count + 1))
