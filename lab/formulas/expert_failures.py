"""Goodput of a node whose ranks fail, with and without copies of its experts, by formula. Pure.

Ranks fail one by one, each after `between_s` on average, and are back after `back_s`. At most one is away at a time: a
node of W ranks has all of them P0 = between / (between + W back) of the time. In the rest it

    with copies       goes on with W - 1 ranks, after a pause of `pause_s` until the rank is masked
    without           serves nothing: every token needs experts of every rank. The requests under way are computed
                      again; on average half of their answers is lost

Copies cost KV memory, so batches are smaller all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.formulas.roofs import decode_batch, decode_share
from lab.simulator.models.step_models import StepModel


@dataclass(frozen=True, slots=True)
class Failures:
    """Of one rank, seconds."""

    between_s: float
    back_s: float
    pause_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """Requests with a mean context and mean answer in tokens, and the limit between two tokens in seconds."""

    context: int
    answer: float
    tbt_s: float


def tokens_s(model: StepModel, wanted: Decoding) -> float:
    """Tokens of answers per second of a node that is full all the time."""
    return 1 / decode_share(model, wanted.context, wanted.tbt_s)  # 1 / infinity = 0


def goodput(whole: StepModel, less: StepModel | None, ranks: int, failures: Failures, wanted: Decoding) -> float:
    """Tokens per second. `whole`: with all ranks; `less`: without one of them, None if it cannot serve then."""
    well = failures.between_s / (failures.between_s + ranks * failures.back_s)
    per_s = well * ranks / failures.between_s  # failures
    full = tokens_s(whole, wanted)
    if less is None:
        return max(0.0, well * full - per_s * decode_batch(whole, wanted.context, wanted.tbt_s) * wanted.answer / 2)
    return max(0.0, well * full + (1 - well) * tokens_s(less, wanted) - per_s * failures.pause_s * full)
