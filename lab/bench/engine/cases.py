"""The requests of the engine benchmark: prompts that every server tokenizes alike, and its cases. No clock.

Prompts consist of words of one token each, " word", so that a server that takes only text computes the same token ids
as one that takes ids. They are drawn by (seed, case, round, request): every server gets the same ones, and no prompt
finds its own KV in the next round.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from engine.text.tokenizer import Tokenizer
from lab.bench.common.client import Outcome
from lab.bench.common.latency import tpot_s
from lab.bench.common.workload import Spec, with_arrivals

SECTIONS = ("decode", "prefill", "open-loop", "prefix")
WORD = re.compile(r" [A-Za-z]{2,}")
CHECKED_TOKENS = 2000

Wave = list[Spec]
"""Requests that are sent together, each at its own time; the next wave starts when all of them have ended."""
Samples = dict[str, list[float]]
"""metric -> milliseconds"""


class Prompts:
    """Token ids and their text by name."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        """Raises ValueError if the tokenizer's words do not survive the conversion to text and back."""
        self._tokenizer, self._seed = tokenizer, seed
        ids = range(tokenizer.vocab_size)
        self._words = np.array([i for i in ids if WORD.fullmatch(tokenizer.token_bytes(i).decode("latin-1"))])
        sample = self.ids(min(CHECKED_TOKENS, 4 * len(self._words)), 0)
        if not sample or tokenizer.encode(tokenizer.decode(sample)) != sample:
            raise ValueError("this tokenizer has no words that are one token each: no prompt is the same as text")

    def ids(self, length: int, *name: int) -> list[int]:
        rng = np.random.default_rng([self._seed, *name])
        drawn: list[int] = rng.choice(self._words, length).tolist() if len(self._words) else []
        return drawn

    def spec(self, token_ids: list[int], output_len: int) -> Spec:
        return Spec(token_ids, output_len, text=self._tokenizer.decode(token_ids))


@dataclass(frozen=True, slots=True)
class Case:
    """One line (or two) of the benchmark. Lengths in tokens."""

    section: str
    name: str
    prompt_len: int
    output_len: int
    count: int  # decode: batch; prefill, prefix: repeats; open loop: requests
    rate: float = 0.0  # open loop: requests/s
    shared_len: int = 0  # prefix: tokens of the prompt that both requests share
    metrics: tuple[str, ...] = field(default=("TTFT",))

    def waves(self, prompts: Prompts, round_number: int) -> list[Wave]:
        """The requests of one round, the same for every server."""
        name = (1 + SECTIONS.index(self.section), self.prompt_len, self.count, round(1000 * self.rate), round_number)
        draw = partial(_draw, prompts, name)
        if self.section == "prefix":
            pairs = []
            for i in range(self.count):
                shared = draw(self.shared_len, 2 * i)
                own = self.prompt_len - self.shared_len
                pairs += [[prompts.spec(shared + draw(own, 2 * i + 1, half), self.output_len)] for half in (0, 1)]
            return pairs
        specs = [prompts.spec(draw(self.prompt_len, i), self.output_len) for i in range(self.count)]
        if self.section == "prefill":
            return [[spec] for spec in specs]
        if self.section == "open-loop":
            specs = with_arrivals(specs, round_number, self.rate, burstiness=1.0)
        return [specs]

    def samples(self, waves: Sequence[Sequence[Outcome]]) -> Samples:
        """The measurements of one round. Every outcome must be a success."""
        flat = [outcome for wave in waves for outcome in wave]
        if self.section == "decode":
            return {"TPOT": [steady_tpot_s(flat) * 1000]}
        ttft = [outcome.ttft_s * 1000 for outcome in flat]
        if self.section == "prefill":
            return {"TTFT": ttft}
        if self.section == "prefix":
            return {"TTFT first": ttft[0::2], "TTFT second": ttft[1::2]}
        return {"TTFT": ttft, "TPOT": [tpot_s(outcome) * 1000 for outcome in flat]}

    @property
    def timeout_s(self) -> float:
        """Seconds after which a server has not kept up with the open loop, or is broken."""
        return 2 * self.count / self.rate + 10 if self.rate else 180.0


def _draw(prompts: Prompts, name: tuple[int, ...], length: int, *more: int) -> list[int]:
    return prompts.ids(length, *name, *more)


def steady_tpot_s(outcomes: Sequence[Outcome]) -> float:
    """Seconds per token of a request while all requests of the batch decode: from the moment the last of them has its
    first token until the first of them ends. This excludes the prefills while the batch fills. Mean over the requests;
    tokens of an event with several tokens are spread evenly over the events."""
    start = max(o.sent_s + o.ttft_s for o in outcomes)
    end = min(o.sent_s + o.e2e_s for o in outcomes)
    paces = []
    for o in outcomes:
        times = np.cumsum([o.sent_s + o.ttft_s, *o.itl_s])
        inside = times[(times >= start) & (times <= end)]
        if len(inside) > 1:
            tokens = o.output_tokens / len(times) * (len(inside) - 1)
            paces.append((inside[-1] - inside[0]) / tokens)
    if not paces:
        raise ValueError("the requests of the batch did not decode together: give them more output tokens")
    return float(np.mean(paces))


def cases(sections: Sequence[str], quick: bool) -> list[Case]:
    """The cases of the issue; a small set under --quick."""
    batches, lengths = ((1, 8), (128, 512)) if quick else ((1, 8, 32), (128, 512, 2048, 8000))
    output, shared, repeats = (24, 1000, 1) if quick else (96, 4000, 2)
    rates = ((2.0, 8, 16),) if quick else ((1.0, 100, 64), (4.0, 100, 64))
    # 100 requests: a 99th percentile of fewer is their largest value
    # the first request of a batch must still decode when the last one has its first token
    every = [Case("decode", f"decode, batch {n}", 256, output * (1 + n // 16), n, metrics=("TPOT",)) for n in batches]
    every += [Case("prefill", f"prefill {n:,}", n, 2, 1 if quick else 5 if n < 1000 else 2) for n in lengths]
    every += [
        Case("open-loop", f"512 in / {out} out, {rate:g}/s", 512, out, count, rate, metrics=("TTFT", "TPOT"))
        for rate, count, out in rates
    ]
    metrics = ("TTFT first", "TTFT second")
    every.append(Case("prefix", f"{shared:,} shared + 50", shared + 50, 2, repeats, 0.0, shared, metrics))
    return [case for case in every if case.section in sections]
