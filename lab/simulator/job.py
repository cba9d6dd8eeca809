"""One request in the simulated cluster, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter


@dataclass(slots=True, eq=False)
class Job:
    """Times are seconds of the run; NaN = the job did not reach that point. Satisfies sched.queueing.Prompt."""

    index: int
    arrival: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # ids; each identifies its block and everything before it
    service_class: str = "standard"
    session: int = -1  # of which it is a turn; -1 = none

    acceptor: int = -1  # if acceptors differ (lab/simulator/acceptors.py)
    prefill: str = ""
    decode: str = ""
    source: str = "none"  # source of the prefix: local, pool, none
    prefix_tokens: int = 0  # tokens of the prompt that were not computed
    fetched_tokens: int = 0  # of these, those fetched from the pool
    ssd_tokens: int = 0  # of these, those read from SSD
    computed: int = 0  # tokens of the prompt, including the prefix
    split: int = 0  # the decode node computes the prompt from this token on (rivals/dynaserve.py); 0 = it does not
    decoded: int = 0
    retries: int = 0  # attempts that a crash or a preemption ended
    preemptions: int = 0  # of these, the preemptions
    resumed: int = 0  # tokens answered by those attempts, now part of the prompt
    estimate_s: float = float("nan")  # of TTFT, at placement
    estimates: dict[str, float] = field(default_factory=dict)  # all estimates of the last decision
    prefill_s: float = 0.0  # estimated work, its weight in the queue
    refused: str = ""

    sent: float = float("nan")  # start of the last attempt, before its probes
    placed: float = float("nan")  # the same, after the probes
    begun: float = float("nan")  # start of prefill
    first_token: float = float("nan")
    joined: float = float("nan")  # when it joined its first decode batch
    paused: float = float("nan")  # when it left a node for another one, until its next token
    finished: float = float("nan")
    longest_gap: float = 0.0
    gaps: list[tuple[int, float]] = field(default_factory=list)  # (number of gaps between tokens, seconds of each)
    fetched: float = 0.0  # seconds to fetch the prefix
    broken: float = float("nan")  # when the last attempt's node crashed
    prefilled: float = float("nan")  # end of the last attempt's prefill
    log: list[tuple[float, str]] = field(default_factory=list)

    def restart(self, crashed: float) -> None:
        """Start a new attempt: the tokens answered so far become part of the prompt."""
        self.retries += 1
        self.resumed += self.decoded
        self.input_tokens += self.decoded
        self.output_tokens -= self.decoded
        self.broken = self.broken if math.isnan(self.prefilled) and not math.isnan(self.broken) else crashed
        self.computed = self.decoded = self.prefix_tokens = self.split = 0
        self.sent = self.begun = self.prefilled = self.joined = self.paused = math.nan
        self.log = []

    @property
    def goal(self) -> int:
        """Tokens of the prompt that have KV when the present node has computed its part."""
        return self.split or self.input_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.goal - self.computed

    @property
    def answer_tokens(self) -> int:
        """Of all attempts; `output_tokens` are those of the last one."""
        return self.resumed + self.output_tokens

    @property
    def context(self) -> int:
        """Tokens that have KV during decoding."""
        return self.input_tokens + self.decoded

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tbt(self) -> float:
        """Mean gap between tokens, the hand-over included; NaN for one token."""
        gaps = self.answer_tokens - 1
        return (self.finished - self.first_token) / gaps if gaps else float("nan")

    @property
    def tail_tbt(self) -> float:
        """FAST'25's time between tokens: the mean of the longest tenth of the gaps; NaN for one token."""
        left = tenth = -(-sum([count for count, _ in self.gaps]) // 10)
        if not tenth:
            return float("nan")
        total = 0.0
        for count, seconds in sorted(self.gaps, key=itemgetter(1), reverse=True):
            taken = min(count, left)
            total += taken * seconds
            left -= taken
        return total / tenth
