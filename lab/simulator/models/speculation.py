"""A step model whose decode steps verify drafts (Leviathan et al., arXiv 2211.17192).

If each of k drafted tokens is correct with probability a, given correct ones before it, a step keeps on average

    E = (1 - a^(k + 1)) / (1 - a)

tokens, including the one that the target adds. It computes k + 1 tokens per request instead of one and reads weights
and KV once. A draft model of `size` times the target's parameters first makes k steps, each of which reads its own KV
of the context, `kv_share` times the target's. Its KV of a prompt is neither moved nor pooled: the decode node computes
all of it, CATCH_UP_TOKENS tokens in each step (engine/speculation/draft.py), also if the target's is found. A step's
time is spread evenly over its tokens, so that the model still describes steps of one token; a request whose draft KV is
not complete yet gets as many tokens as the others.
"""

from __future__ import annotations

from dataclasses import replace

from lab.simulator.models.step_models import StepModel

CATCH_UP_TOKENS = 256
"""The engine's: tests/lab/ablations/test_speculative.py holds them against each other."""


def kept_tokens(drafted: int, acceptance: float) -> float:
    """E. Raises ValueError."""
    if drafted < 0 or not 0 <= acceptance < 1:
        raise ValueError(f"drafts must not be negative and acceptance at least 0 and below 1: {drafted}, {acceptance}")
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def speculating(
    model: StepModel, drafted: int, acceptance: float, size: float = 0.0, kv_share: float = 0.0
) -> StepModel:
    """`size` and `kv_share` 0: free drafts, like n-grams of the prompt. Raises ValueError."""
    made = verifying(model, drafted, kept_tokens(drafted, acceptance), size, kv_share)
    return replace(made, name=f"{model.name}, {drafted} drafts at {acceptance:g}")


def verifying(model: StepModel, drafted: float, kept: float, size: float = 0.0, kv_share: float = 0.0) -> StepModel:
    """Steps with `drafted` drafts per request on average keep `kept` tokens of it, as a benchmark measures both. Raises
    ValueError."""
    if bool(size) != bool(kv_share):
        raise ValueError(f"a draft model has parameters and KV, and n-grams have neither: {size} and {kv_share}")
    if not drafted >= 0 or not 1 <= kept <= 1 + drafted:
        raise ValueError(f"a step keeps at least 1 token, and at most one more than its drafts: {kept} of {drafted}")
    w, p, d0, d1, k = model.decode
    draft_s = drafted * (size * w + d0 / 8) if size else 0.0  # a small model's step has an eighth of the overhead
    p, k = p * (drafted + 1 + drafted * size), k * (1 + drafted * kv_share)
    decode = (w / kept, p / kept, (d0 + draft_s) / kept, d1 / kept, k / kept)
    return replace(
        model,
        name=f"{model.name}, {drafted:.3g} drafts, {kept:.3g} tokens kept",
        decode=decode,
        draft_size=size,
        draft_tokens=CATCH_UP_TOKENS / kept if size else 0.0,
    )
