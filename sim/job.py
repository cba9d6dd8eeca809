"""One request on its way through the simulated cluster, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Job:
    """Times are seconds of the run; NaN = it did not get there. Satisfies sched.queueing.Job."""

    index: int
    arrival: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # ids, each stands for its block and everything before it
    service_class: str = "standard"

    prefill: str = ""
    decode: str = ""
    source: str = "none"  # of the prefix: local, pool, none
    prefix_tokens: int = 0  # not computed
    computed: int = 0  # of the prompt, prefix included
    decoded: int = 0
    retries: int = 0
    estimate_s: float = float("nan")  # of TTFT, when it was placed
    prefill_s: float = 0.0  # estimated work, what it weighs in the queue
    refused: str = ""

    placed: float = float("nan")
    begun: float = float("nan")  # prefill
    first_token: float = float("nan")
    joined: float = float("nan")  # the decode batch
    finished: float = float("nan")
    longest_gap: float = 0.0
    fetched: float = 0.0  # seconds that the prefix took
    log: list[tuple[float, str]] = field(default_factory=list)

    @property
    def num_uncomputed(self) -> int:
        return self.input_tokens - self.computed

    @property
    def context(self) -> int:
        """Tokens with KV while it decodes."""
        return self.input_tokens + self.decoded

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tbt(self) -> float:
        """Mean gap between tokens, the hand-over included; NaN for one token."""
        gaps = self.output_tokens - 1
        return (self.finished - self.first_token) / gaps if gaps else float("nan")
