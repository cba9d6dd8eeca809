"""The load of one worker as this acceptor sees it: its own requests there, and what the worker tells of all. Pure.

The cost of prefills and decode steps is learned from the times of the answers. A worker computes prompts in order, so a
prompt took the time from the first token before it, or from its own arrival if that is later, to its own first token.
Prompts whose first tokens come together were computed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.backends.told import Told
from sched.cost import DecodeModel, PrefillModel, prefill_features
from sched.placement.view import Candidate

TOGETHER_S = 0.003
"""First tokens within this time are of one step."""

SAMPLE_TOKENS = 8
"""Tokens of an answer per measured decode time: single tokens arrive in bursts."""

KNOWN = 16
"""Measurements of a worker after which it is judged by its own ones."""

MANY_BLOCKS = 1 << 30
"""Of a worker that does not tell how many it has."""


@dataclass(slots=True)
class Prefilling:
    sent: float
    tokens: int
    cached: int
    expected_s: float


@dataclass(slots=True)
class Decoding:
    context: int
    begun: float
    since: float
    count: int = 0  # tokens since then


@dataclass(slots=True)
class Computed:
    """Prompts of one step."""

    features: tuple[float, float, float]
    seconds: float


@dataclass(slots=True)
class Costs:
    """What prompts and decode steps cost."""

    prefill: PrefillModel = field(default_factory=PrefillModel)
    decode: DecodeModel = field(default_factory=DecodeModel)


@dataclass(slots=True)
class Load:
    """Times are seconds on one monotonic clock. `common`: what is learned from all workers together."""

    common: Costs = field(default_factory=Costs)
    own: Costs = field(default_factory=Costs)
    told: Told = field(default_factory=Told)
    told_at: float = 0.0
    _others: int = 0  # requests there that are not ours, when it told
    _others_waiting: int = 0
    _prefilling: dict[str, Prefilling] = field(default_factory=dict)
    _decoding: dict[str, Decoding] = field(default_factory=dict)
    _last_first: float = 0.0
    _computed: Computed | None = None
    _typical_s: float = 0.0  # mean prefill
    _decode_s: float = 0.0  # mean time from the first to the last token

    @property
    def prefill(self) -> PrefillModel:
        """Workers are taken for equal until this one has been measured often enough: one late answer among few would
        make it look slow, and get it no more prompts."""
        known = self.own.prefill.regression.observations >= KNOWN
        return self.own.prefill if known else self.common.prefill

    @property
    def decode(self) -> DecodeModel:
        known = self.own.decode.regression.observations >= KNOWN
        return self.own.decode if known else self.common.decode

    # --- a request, from sending to its end

    def sent(self, name: str, now: float, tokens: int, cached: int) -> None:
        """A prompt of `tokens`, of which the worker probably holds `cached`."""
        self._settle(now)
        self._prefilling[name] = Prefilling(now, tokens, cached, self.prefill.estimate(tokens - cached, cached))

    def token(self, name: str, now: float) -> None:
        """An output token arrived."""
        if (one := self._prefilling.pop(name, None)) is not None:
            self._first(name, one, now)
            return
        if (decoding := self._decoding.get(name)) is None:
            return
        decoding.context += 1
        decoding.count += 1
        if decoding.count == SAMPLE_TOKENS:
            seconds = (now - decoding.since) / SAMPLE_TOKENS
            if seconds > 0:
                for costs in (self.own, self.common):
                    costs.decode.observe(len(self._decoding), self._context, seconds)
            decoding.since, decoding.count = now, 0

    def ended(self, name: str, now: float) -> None:
        """The answer is complete, was aborted, or failed."""
        self._prefilling.pop(name, None)
        if (one := self._decoding.pop(name, None)) is not None:
            self._decode_s += ((now - one.begun) - self._decode_s) / (8 if self._decode_s else 1)

    def tells(self, now: float, told: Told) -> None:
        self._settle(now)
        self.told, self.told_at = told, now
        own = len(self._prefilling) + len(self._decoding)
        self._others = max(0, told.running + told.waiting - own)
        self._others_waiting = min(self._others, max(0, told.waiting - len(self._prefilling)))

    # --- what follows for placement

    @property
    def running(self) -> int:
        return len(self._decoding) + self._others - self._others_waiting

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return len(self._prefilling) + self._others_waiting

    @property
    def queued_tokens(self) -> int:
        return sum(one.tokens - one.cached for one in self._prefilling.values())

    def work_s(self, now: float) -> float:
        """Until a prompt that arrives now is begun."""
        queue = list(self._prefilling.values())
        left = sum(one.expected_s for one in queue) + self._others_waiting * self._typical_s
        if queue:
            spent = now - max(queue[0].sent, self._last_first)
            left -= min(max(0.0, spent), queue[0].expected_s)
        return left

    def candidate(self, name: str, now: float, block_size: int) -> Candidate:
        """block_size: tokens of a block in the demands of requests."""
        self._settle(now)
        running, context = self.running, self._context
        step_s, told = self.decode.estimate(running + 1, context), self.told
        scale = told.block_size / block_size if told.block_size else 1.0
        total = int(told.blocks * scale) if told.blocks else MANY_BLOCKS
        return Candidate(
            node_id=name,
            roles=("prefill", "decode"),
            wait_s=self.work_s(now),
            waiting=self.waiting,
            running=running,
            queued_tokens=self.queued_tokens,
            prefill=self.prefill.coefficients,
            free_blocks=int(total * (1.0 - told.usage)),
            total_blocks=total,
            step_s=step_s,
            step_soon_s=self.decode.estimate(running + self.waiting + 1, context + self.queued_tokens),
            step_alone_s=self.decode.estimate(1, 0),
            decode_s=self._decode_s,
            age_s=now - self.told_at,
        )

    @property
    def _context(self) -> int:
        return sum(one.context for one in self._decoding.values())

    def _first(self, name: str, one: Prefilling, now: float) -> None:
        features = prefill_features(max(1, one.tokens - one.cached), one.cached)
        seconds = now - max(one.sent, self._last_first)
        together = now - self._last_first < TOGETHER_S
        if together and (last := self._computed) is not None:
            _, tokens, pairs = last.features
            self._computed = Computed((1.0, tokens + features[1], pairs + features[2]), last.seconds + seconds)
        else:
            self._learn()
            self._computed = Computed(features, seconds)
        self._last_first = now
        self._decoding[name] = Decoding(one.tokens, now, now)

    def _settle(self, now: float) -> None:
        if now - self._last_first >= TOGETHER_S:
            self._learn()

    def _learn(self) -> None:
        if (one := self._computed) is not None and one.seconds > 0:
            for costs in (self.own, self.common):
                costs.prefill.regression.observe(one.features, one.seconds)
            self._typical_s += (one.seconds - self._typical_s) / (8 if self._typical_s else 1)
        self._computed = None
