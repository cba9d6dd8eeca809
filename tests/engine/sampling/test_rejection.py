"""Speculation keeps the sampling distribution: many runs over a toy vocabulary against the exact distribution."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow, _floors, probabilities, sample
from engine.speculation.speculative import accepted

torch.set_num_threads(1)
VOCAB, RUNS, SEED = 4, 3000, 20261121


class Toy:
    """Logits that depend on the last token and the length: [VOCAB, length, VOCAB]."""

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(VOCAB, 8, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5

    def logits(self, texts: list[list[int]]) -> torch.Tensor:
        return torch.stack([self.table[text[-1], len(text)] for text in texts])


def speculate(target: Toy, draft: Toy | None, params: SamplingParams, rejection: bool) -> list[list[int]]:
    """RUNS texts of one prompt token and three more, two draft tokens per step. Without a draft model the draft is a
    fixed guess, as an n-gram is."""
    texts = [[0] for _ in range(RUNS)]
    while rows := [i for i in range(RUNS) if len(texts[i]) < 4]:
        drafts: list[list[int]] = [[] for _ in rows]
        proposals: list[list] = [[] for _ in rows]
        for j in range(2):
            if draft is None:
                for guess in drafts:
                    guess.append(1 + j)
                continue
            have = [texts[i] + drafts[n] for n, i in enumerate(rows)]
            own = [
                SamplingRow(params, texts[i], 1, SEED + i, draft=tuple(drafts[n]), wants_probabilities=rejection)
                for n, i in enumerate(rows)
            ]
            for n, token in enumerate(sample(draft.logits(have), own)):
                drafts[n].append(token.token_id)
                proposals[n].append(token.probabilities)
        have, own = [], []
        for n, i in enumerate(rows):
            for j in range(3):
                have.append(texts[i] + drafts[n][:j])
                judged = (drafts[n][j], proposals[n][j]) if draft is not None and rejection and j < 2 else None
                own.append(SamplingRow(params, texts[i], 1, SEED + i, draft=drafts[n][:j], proposal=judged))
        tokens = [s.token_id for s in sample(target.logits(have), own)]
        for n, i in enumerate(rows):
            chosen = tokens[3 * n : 3 * n + 3]
            texts[i] += chosen[: accepted(drafts[n], chosen) + 1]
    return [text[1:4] for text in texts]


def expected(target: Toy, params: SamplingParams) -> dict[tuple[int, ...], float]:
    chances = {}
    for text in product(range(VOCAB), repeat=3):
        chance, have = 1.0, [0]
        for token in text:
            chance *= float(probabilities(target.logits([have]), [params])[0, token])
            have.append(token)
        chances[text] = chance
    return chances


@pytest.mark.parametrize("case", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("proposer", ["ngram", "same-draw", "rejection"])
def test_texts_follow_the_targets_distribution(case, proposer):
    """Chi-square over all texts of three tokens; the bound is five standard deviations above the mean."""
    target, draft = Toy(1), None if proposer == "ngram" else Toy(2)
    params = SamplingParams(**case)
    texts = speculate(target, draft, params, proposer == "rejection")
    count = {}
    for text in texts:
        count[tuple(text)] = count.get(tuple(text), 0) + 1
    chances = expected(target, params)
    assert {text for text in count if chances[text] == 0} == set()
    usual = [text for text in chances if chances[text] * RUNS >= 5]
    observed = np.array(
        [count.get(text, 0) for text in usual] + [sum(count.get(t, 0) for t in chances if t not in usual)]
    )
    wanted = np.array([chances[text] for text in usual] + [sum(chances[t] for t in chances if t not in usual)]) * RUNS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    print(f"seed {SEED}: chi-square {chi:.1f} at {freedom} degrees of freedom")
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_same_draw_gives_the_very_tokens_of_no_speculation():
    target, params = Toy(3), SamplingParams()
    plain = [[0] for _ in range(RUNS)]
    for _ in range(3):
        rows = [SamplingRow(params, text, 1, SEED + i) for i, text in enumerate(plain)]
        for text, token in zip(plain, sample(target.logits(plain), rows), strict=True):
            text.append(token.token_id)
    for draft in (Toy(4), None):
        assert speculate(target, draft, params, rejection=False) == [text[1:] for text in plain]


def test_rejection_accepts_as_often_as_the_distributions_overlap():
    """And the same draw a little less often, at least (1 - t) / (1 + t) with t the total variation distance; both
    exactly when p equals q."""
    vocab, params = 50, SamplingParams()
    generator = torch.Generator().manual_seed(7)
    p_logits = torch.randn(1, vocab, generator=generator)
    q_logits = p_logits + 0.7 * torch.randn(1, vocab, generator=generator)
    runs = 6000
    drafts = sample(
        q_logits.expand(runs, -1), [SamplingRow(params, [0], 1, s, wants_probabilities=True) for s in range(runs)]
    )
    judged = [SamplingRow(params, [0], 1, s, proposal=(d.token_id, d.probabilities)) for s, d in enumerate(drafts)]
    plain = [SamplingRow(params, [0], 1, s) for s in range(runs)]

    def share(logits: torch.Tensor, rows: list[SamplingRow]) -> float:
        chosen = sample(logits.expand(runs, -1), rows)
        return sum(d.token_id == c.token_id for d, c in zip(drafts, chosen, strict=True)) / runs

    p, q = probabilities(p_logits, [params]), probabilities(q_logits, [params])
    overlap = float(torch.minimum(p, q).sum())
    assert share(p_logits, judged) == pytest.approx(overlap, abs=5 * math.sqrt(overlap * (1 - overlap) / runs))
    assert overlap / (2 - overlap) < share(p_logits, plain) < overlap - 0.03
    assert share(q_logits, judged) == share(q_logits, plain) == 1.0


def test_host_and_device_probabilities_agree():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5)) * 3
    cases = [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 9}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]
    params = [SamplingParams(**case) for case in cases]
    ours = probabilities(logits, params)
    assert torch.allclose(ours.sum(-1), torch.ones(6), atol=1e-5)
    for row, own, p in zip(logits, params, ours, strict=True):
        scaled = (row - row.max()) / own.temperature
        weights = scaled.exp().masked_fill_(scaled < _floors(scaled[None], [own])[0], 0)
        assert torch.allclose(p, weights / weights.sum(), atol=1e-6), own
