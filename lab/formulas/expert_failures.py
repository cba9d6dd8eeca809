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

from lab.simulator.models.step_models import StepModel


@dataclass(frozen=True, slots=True)
class Failures:
    """Of one rank, seconds."""

    between_s: float
    back_s: float
    pause_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """Requests with a mean context and mean answer in tokens, and the limit between two tokens."""

    context: float
    answer: float
    tbt_s: float


def batch_of(model: StepModel, wanted: Decoding) -> int:
    """The most requests that fit into the memory and whose steps take at most the limit; 0 if not even one does."""
    low, high = 0, int(min(model.max_batch, model.kv_tokens // max(1, model.held_tokens(round(wanted.context)))))
    while low < high:
        middle = (low + high + 1) // 2
        if model.decode_s(middle, round(middle * wanted.context)) <= wanted.tbt_s:
            low = middle
        else:
            high = middle - 1
    return low


def tokens_s(model: StepModel, wanted: Decoding) -> float:
    """Tokens of answers per second of a node that is full all the time."""
    batch = batch_of(model, wanted)
    return batch / model.decode_s(batch, round(batch * wanted.context)) if batch else 0.0


def goodput(whole: StepModel, less: StepModel | None, ranks: int, failures: Failures, wanted: Decoding) -> float:
    """Tokens per second. `whole`: with all ranks; `less`: without one of them, None if it cannot serve then."""
    well = failures.between_s / (failures.between_s + ranks * failures.back_s)
    per_s = well * ranks / failures.between_s  # failures
    full = tokens_s(whole, wanted)
    if less is None:
        return max(0.0, well * full - per_s * batch_of(whole, wanted) * wanted.answer / 2)
    return max(0.0, well * full + (1 - well) * tokens_s(less, wanted) - per_s * failures.pause_s * full)
