"""Draws by a race: the distribution, the random numbers, and how seldom rounding changes a draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from engine.sampling.race import PIECE, race, race_among, race_numbers
from engine.sampling.sampler import SamplingRow, draw, probabilities, sample
from engine.sampling.uniform import stream_key

torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCAB, SEED = 49152, 20261123


def splitmix(key: int, count: int) -> list[int]:
    """SplitMix64 from its published definition, with Python's integers."""
    numbers = []
    for n in range(1, count + 1):
        x = (key + n * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        numbers.append(x ^ x >> 31)
    return numbers


def plain_exponentials(key: int, count: int) -> np.ndarray:
    return np.array([-math.log(((x >> 12) + 0.5) / 2**52) for x in splitmix(key, count)])


def plain_race(weights: np.ndarray, key: int) -> int:
    """float64, one row, from the definition."""
    count = -(-len(weights) // PIECE)
    numbers = plain_exponentials(key, count + PIECE)
    sums = [weights[PIECE * n :][:PIECE].sum() for n in range(count)]
    piece = int(np.argmax(sums / numbers[:count]))
    inside = weights[PIECE * piece :][:PIECE]
    return PIECE * piece + int(np.argmax(inside / numbers[count:][: len(inside)]))


def test_the_random_numbers_are_splitmix64():
    """The first literals are the published outputs for this key; they keep streams equal between versions and nodes."""
    assert splitmix(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys = [1234567, 0, -1, 2**63 - 1, -(2**63), stream_key(1, 2)]
    for key, row in zip(keys, race_numbers(keys, 3 * PIECE + 1, CPU), strict=True):
        np.testing.assert_allclose(row.numpy(), plain_exponentials(key % 2**64, 4 + PIECE), rtol=1e-14)


@settings(max_examples=200, deadline=None)
@given(
    key=st.integers(-(2**63), 2**63 - 1),
    count=st.integers(1, 4 * PIECE + 3),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1.0, 10.0]),
    admitted=st.sampled_from([1.0, 0.5, 0.01]),
)
def test_the_winner_is_that_of_a_reference_in_float64(key, count, seed, spread, admitted):
    rng = np.random.default_rng(seed)
    weights = np.exp(spread * rng.standard_normal(count)).astype(np.float32)
    weights[rng.random(count) >= admitted] = 0
    weights[rng.integers(count)] = 1
    numbers = race_numbers([key], count, CPU)
    (winner,) = race(torch.from_numpy(weights)[None], numbers).tolist()
    assert winner == plain_race(weights.astype(np.float64), key % 2**64)
    assert weights[winner] > 0
    ids = np.flatnonzero(weights)
    assert race_among(ids, weights[ids], numbers[0].numpy()) == winner


@pytest.mark.parametrize("count", [2, 40, 1000])
def test_indices_win_as_often_as_their_weights_say(count):
    """Chi-square over 20,000 races; the bound is five standard deviations above the mean."""
    runs = 20_000
    weights = torch.rand(count, generator=torch.Generator().manual_seed(SEED)) ** 2 + 0.05
    won = race(weights.expand(runs, -1), race_numbers([stream_key(SEED, i) for i in range(runs)], count, CPU))
    observed = np.bincount(won.numpy(), minlength=count)
    expected = (weights.double() / weights.double().sum()).numpy() * runs
    chi = ((observed - expected) ** 2 / expected).sum()
    print(f"seed {SEED}: chi-square {chi:.1f} at {count - 1} degrees of freedom")
    assert chi < count - 1 + 5 * math.sqrt(2 * (count - 1))


def test_neither_nan_nor_zeros_leave_the_vocabulary():
    weights = torch.stack([torch.zeros(300), torch.full((300,), torch.nan)])
    assert all(0 <= winner < 300 for winner in race(weights, race_numbers([1, 2], 300, CPU)).tolist())


@pytest.mark.parametrize(
    ("mean", "spread", "case"),
    [(12.0, 0.1, {}), (0.0, 3.0, {"temperature": 0.8}), (0.0, 3.0, {"top_p": 0.95}), (0.0, 3.0, {"top_k": 200})],
    ids=["flat", "peaked", "top_p", "top_k"],
)
def test_rounding_seldom_changes_a_draw(mean, spread, case):
    """Logits with an error of 1e-6 of their size, as two batch shapes give them. Two heats may change at most
    4 t of all draws, with t the total variation distance of the admitted tokens' probabilities, which includes a token
    that only one of the two admits. Inverting a cumulative sum changed 0.1 % to 1 % of the draws."""
    draws, at_once, generator = 1000, 100, torch.Generator().manual_seed(SEED)
    params, changed, most = SamplingParams(**case), 0, 0.0
    for begin in range(0, draws, at_once):
        logits = torch.randn(VOCAB, generator=generator) * spread + mean
        other = logits * (1 + 1e-6 * torch.randn(VOCAB, generator=generator))
        p, q = probabilities(torch.stack((logits, other)), [params, params])
        most += at_once * 2 * float((p - q).abs().sum())
        rows = [SamplingRow(params, [0], 1, begin + i) for i in range(at_once)]
        first = sample(logits.expand(at_once, -1), rows)
        changed += sum(a != b for a, b in zip(first, sample(other.expand(at_once, -1), rows), strict=True))
    print(f"seed {SEED}: {changed} of {draws} draws changed, at most {most:.2f} expected")
    assert changed <= most + 4 * math.sqrt(most) + 1


def test_a_token_that_is_no_longer_admitted_changes_few_draws():
    """top_k 50 or 49: the total variation distance t is the probability of the token on the border, and two heats may
    change at most 4 t of all draws."""
    logits, runs = torch.randn(1, 1000, generator=torch.Generator().manual_seed(SEED)), 4000
    wide, narrow = (SamplingParams(top_k=k) for k in (50, 49))
    t = float(probabilities(logits, [wide])[0, logits[0].topk(50).indices[-1]])
    keys = [stream_key(SEED, i) for i in range(runs)]
    drawn = [draw(logits.expand(runs, -1), [params] * runs, torch.ones(runs), keys) for params in (wide, narrow)]
    changed = int((drawn[0] != drawn[1]).sum())
    print(f"seed {SEED}: {changed} of {runs} draws changed, t {t:.4f}")
    assert 0 < changed < 4 * t * runs
