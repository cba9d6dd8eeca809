"""Batching policies: how many prefill tokens a step may have in addition to its decodes. Pure.

    prefill-first  prompts whole, decodes wait until none is left (vLLM's first scheduler)
    decode-first   every decode, then prefill up to the step's token budget
    mixed          every decode, then at most a fixed chunk of prefill (Sarathi-Serve, section 4)
    dynamic        every decode, then the largest chunk with which the step is predicted to stay within a time, or to
                   take four times as long as its decodes

Whatever the policy, a step with prefill is kept within a time (BoundedSteps): until it ends nobody is aborted, admitted
or answered.

They are budget policies of one scheduler (engine/core/batcher.py), not schedulers: a step has a token budget, a policy
says how much of it prefill may take. On a node that only prefills, all but `mixed` are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LEAST_CHUNK_TOKENS = 32
"""`dynamic` and BoundedSteps let prefill have so many tokens whatever is predicted: prompts must not starve."""

SLOWDOWN = 4.0
"""`dynamic` lets a step take this many times its decodes, even beyond the wanted time: where decoding alone nearly
uses that up, tiny chunks would multiply the time to first token and hardly help the streams."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step as far as it is made up, and what prefill would find."""

    budget: int  # tokens left of the step's budget
    decodes: int  # rows so far
    decode_context: int  # tokens those rows attend to, together
    prefill_context: int  # tokens already computed of the next prompt


class BatchingPolicy(Protocol):
    """One answer per step."""

    decodes_wait: bool
    """True: a step that has prefill has no decodes."""

    def prefill_tokens(self, load: StepLoad) -> int:
        """Prefill tokens this step may have; the caller cuts it to `load.budget`."""


class PrefillFirst:
    """Least time to first token, and every running stream stalls for every new prompt."""

    decodes_wait = True

    def prefill_tokens(self, load: StepLoad) -> int:
        return load.budget


class DecodeFirst:
    """Most prefill per step; a stream's gap is as long as a full step."""

    decodes_wait = False

    def prefill_tokens(self, load: StepLoad) -> int:
        return load.budget


class MixedChunks:
    """A gap bounded in tokens: the chunk must be tuned to model and machine."""

    decodes_wait = False

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def prefill_tokens(self, load: StepLoad) -> int:
        return self.chunk_tokens


class ChunkPredictor(Protocol):
    """Knows step times; sched.step_cost.StepModel is one."""

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        """A step of decodes alone."""

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        """Most prefill tokens with which such a step takes at most `seconds`; may be negative."""


class DynamicChunks:
    """A gap bounded in time, whatever the batch and the context; no bound while nothing decodes."""

    decodes_wait = False

    def __init__(self, tbt_s: float, predictor: ChunkPredictor) -> None:
        self.tbt_s = tbt_s
        self._predictor = predictor

    def prefill_tokens(self, load: StepLoad) -> int:
        if not load.decodes:
            return load.budget
        alone = self._predictor.decode_seconds(load.decodes, load.decode_context)
        seconds = max(self.tbt_s, SLOWDOWN * alone)
        chunk = self._predictor.largest_chunk(seconds, load.decodes, load.decode_context, load.prefill_context)
        return max(LEAST_CHUNK_TOKENS, chunk)


class StepPredictor(ChunkPredictor, Protocol):
    """The same for steps without decodes."""

    def largest_prefill(self, seconds: float, context: int) -> int:
        """Most prefill tokens behind `context` known ones that take at most `seconds`; may be negative."""


class BoundedSteps:
    """Another policy's answer, cut to what is predicted to fit into a time: a prompt goes on in the next step."""

    def __init__(self, policy: BatchingPolicy, max_s: float, predictor: StepPredictor) -> None:
        self.decodes_wait = policy.decodes_wait
        self._policy, self._max_s, self._predictor = policy, max_s, predictor

    def prefill_tokens(self, load: StepLoad) -> int:
        if load.decodes:
            most = self._predictor.largest_chunk(self._max_s, load.decodes, load.decode_context, load.prefill_context)
        else:
            most = self._predictor.largest_prefill(self._max_s, load.prefill_context)
        return min(self._policy.prefill_tokens(load), max(LEAST_CHUNK_TOKENS, most))


@dataclass(frozen=True, slots=True)
class Tuning:
    """What policies may be told."""

    chunk_tokens: int  # of mixed
    tbt_s: float  # of dynamic
    predictor: ChunkPredictor  # of dynamic


batching_policies: dict[str, Callable[[Tuning], BatchingPolicy]] = {
    "prefill-first": lambda tuning: PrefillFirst(),
    "decode-first": lambda tuning: DecodeFirst(),
    "mixed": lambda tuning: MixedChunks(tuning.chunk_tokens),
    "dynamic": lambda tuning: DynamicChunks(tuning.tbt_s, tuning.predictor),
}
"""By the name on the command line; a rival is one class and one entry here."""
