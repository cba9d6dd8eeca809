"""Batching policies: how many prefill tokens a step may have in addition to its decodes. Pure.

    prefill-first  whole prompts; decodes wait until no prompt is left (vLLM's first scheduler)
    decode-first   every decode, then prefill up to the step's token budget
    mixed          every decode, then at most a fixed chunk of prefill (Sarathi-Serve, section 4)
    dynamic        every decode, then the largest chunk for which the predicted step time stays within a limit. It
                   follows from the objectives of the requests (stretch.py). A fixed limit is at least four times the
                   time of the decodes

With every policy, the time of a step with prefill is bounded (BoundedSteps), because the node aborts, admits and
answers requests only between steps.

These are budget policies of one scheduler (engine/core/step_planner.py), not schedulers: a step has a token budget, and
the policy decides how much of it prefill may use. On a node that only prefills, all except `mixed` are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from sched.classes import CLASSES, Classes
from sched.stretch import MOST, Waiting, stretch

MIN_CHUNK_TOKENS = 32
"""`dynamic` and BoundedSteps always allow this many prefill tokens, so that prompts do not starve."""

SLOWDOWN = 4.0
"""`dynamic` lets a step take this many times the time of its decodes, even beyond a fixed limit. If decoding alone
nearly uses up the limit, tiny chunks would multiply the time to first token and hardly help the streams. With
objectives that holds only where all miss theirs anyway: until then stretch.py weighs prompts against streams."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The decodes of a step, and the prompts."""

    budget: int  # tokens left in the step's budget
    decodes: int  # decode rows in the step
    decode_context: int  # sum of the tokens that these rows attend to
    prefill_context: int  # computed tokens of the next prompt
    classes: Collection[str] = ()  # of the requests that decode
    prompts: Sequence[Waiting] = ()  # next one first; may be empty if nothing decodes
    most_s: float = inf  # seconds of prefill in this step, if the next prompt takes turns (part_turns.py)


class BatchingPolicy(Protocol):
    """Decides once per step how many tokens prefill may use."""

    decodes_wait: bool
    """Whether a step with prefill has no decodes."""

    def prefill_tokens(self, load: StepLoad) -> int:
        """Maximum number of prefill tokens in this step; the caller limits it to `load.budget`."""


class PrefillFirst:
    """Shortest time to first token, but every new prompt stalls every running stream."""

    decodes_wait = True

    def prefill_tokens(self, load: StepLoad) -> int:
        return load.budget


class DecodeFirst:
    """Most prefill per step, but the gap between tokens of a stream is as long as a full step."""

    decodes_wait = False

    def prefill_tokens(self, load: StepLoad) -> int:
        return load.budget


class MixedChunks:
    """Bounds the gap in tokens; the chunk size must be tuned to model and machine."""

    decodes_wait = False

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def prefill_tokens(self, load: StepLoad) -> int:
        return self.chunk_tokens


class ChunkPredictor(Protocol):
    """Predicts step times, like sched.step_cost.StepModel."""

    def decode_seconds(self, decodes: int, decode_context: int) -> float:
        """Seconds of a step with decodes only."""

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """Seconds to compute `tokens` tokens of a prompt after `context` known ones."""

    def largest_chunk(self, seconds: float, decodes: int, decode_context: int, prefill_context: int) -> int:
        """Maximum number of prefill tokens for which the step takes at most `seconds`; may be negative."""


class DynamicChunks:
    """Bounds the gap in seconds for every batch and context; no bound while no request decodes. `tbt_s`: the bound; 0 =
    that of the objectives in `classes`."""

    decodes_wait = False

    def __init__(self, tbt_s: float, predictor: ChunkPredictor, classes: Classes = CLASSES) -> None:
        self.tbt_s = tbt_s
        self._predictor, self._classes = predictor, classes

    def prefill_tokens(self, load: StepLoad) -> int:
        if not load.decodes:
            return load.budget
        alone = self._predictor.decode_seconds(load.decodes, load.decode_context)
        seconds = self._by_objectives(load, alone) if not self.tbt_s else max(self.tbt_s, SLOWDOWN * alone)
        chunk = self._predictor.largest_chunk(seconds, load.decodes, load.decode_context, load.prefill_context)
        return max(MIN_CHUNK_TOKENS, chunk)

    def _by_objectives(self, load: StepLoad, alone_s: float) -> float:
        tbt_s = min(self._classes[name].tbt_s for name in load.classes)
        found = stretch(load.prompts, alone_s, tbt_s, self._classes, self._predictor.prefill_seconds)
        return tbt_s * found if found < MOST else max(tbt_s * MOST, SLOWDOWN * alone_s)


class StepPredictor(ChunkPredictor, Protocol):
    """Also predicts steps without decodes."""

    def largest_prefill(self, seconds: float, context: int) -> int:
        """Maximum number of prefill tokens after `context` known ones that take at most `seconds`; may be negative."""


class BoundedSteps:
    """Limits another policy to the prefill that should fit into `max_s` seconds; the prompt continues in the next
    step."""

    def __init__(self, policy: BatchingPolicy, max_s: float, predictor: StepPredictor) -> None:
        self.decodes_wait = policy.decodes_wait
        self._policy, self._max_s, self._predictor = policy, max_s, predictor

    def prefill_tokens(self, load: StepLoad) -> int:
        max_s = self._max_s
        if load.most_s < max_s:
            alone_s = self._predictor.decode_seconds(load.decodes, load.decode_context) if load.decodes else 0.0
            max_s = min(max_s, load.most_s + alone_s)
        if load.decodes:
            most = self._predictor.largest_chunk(max_s, load.decodes, load.decode_context, load.prefill_context)
        else:
            most = self._predictor.largest_prefill(max_s, load.prefill_context)
        return min(self._policy.prefill_tokens(load), max(MIN_CHUNK_TOKENS, most))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of the policies."""

    chunk_tokens: int  # for mixed
    tbt_s: float  # for dynamic; 0 = by the objectives
    predictor: ChunkPredictor  # for dynamic
    classes: Classes = field(default_factory=lambda: CLASSES)  # for dynamic


METHODS = ("prefill_tokens",)
"""Of a policy in a user's file; it is made with a Tuning, and has `decodes_wait`."""

batching_policies: dict[str, Callable[[Tuning], BatchingPolicy]] = {
    "prefill-first": lambda tuning: PrefillFirst(),
    "decode-first": lambda tuning: DecodeFirst(),
    "mixed": lambda tuning: MixedChunks(tuning.chunk_tokens),
    "dynamic": lambda tuning: DynamicChunks(tuning.tbt_s, tuning.predictor, tuning.classes),
}
"""Policies by their names on the command line. A new policy is one class and one entry here."""
