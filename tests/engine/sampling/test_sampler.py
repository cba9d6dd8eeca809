"""The sampler against a row-by-row one written from the definitions."""

import math

import numpy as np
import pytest
import torch

from engine.sampling.logit_rules import apply_rules
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow, _floors, _temperature, draw, sample
from engine.sampling.uniform import stream_key, uniform

torch.set_num_threads(1)


def row(prompt=(), output=(), seed=0, eos_ids=(), **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=99, **params), [*prompt, *output], len(prompt), seed, tuple(eos_ids))


def tokens(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return [s.token_id for s in sample(logits, rows)]


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def plain_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """From the definitions, one row, float64: temperature, then min_p, top_k, top_p, each renormalised."""
    p = np.exp((logits - logits.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max() * (1 - 1e-6)] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def plain_rules(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Penalties, bias, minimum length, banned and allowed tokens of one row, token by token."""
    logits, params = logits.copy(), row.params
    output = list(row.token_ids[row.num_prompt_tokens :])
    banned: set[int] = set()
    for token in range(len(logits)):
        if token in row.token_ids:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        if token in output:
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        logits[token] += params.logit_bias.get(token, 0)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(row.eos_ids))
        early = len(output) < params.min_tokens and token in stops
        if early or any((*output, token)[-len(word) :] == word for word in params.bad_words):
            banned.add(token)
    only = set(params.allowed_token_ids)
    gone = set() if only and only <= banned else banned
    for token in range(len(logits)):
        if token in gone or (only and token not in only):
            logits[token] = -math.inf
    return logits


def test_greedy_takes_the_largest():
    logits = random_logits(5, 100)
    assert tokens(logits, [row(temperature=0)] * 5) == logits.argmax(-1).tolist()
    assert sample(logits[:0], []) == []


SETS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 699},
    {"top_k": 5000},
    {"top_k": -1},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 600, "top_p": 0.97, "min_p": 0.001},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.95},
    {"temperature": 5.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
]


def reachable(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Every token some draw can choose: the tokens with weight under the sampler's own thresholds."""
    scaled = (logits - logits.max()) / params.temperature
    return set(torch.nonzero(scaled >= _floors(scaled[None], [params])[0]).flatten().tolist())


@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
def test_restricted_sets_are_exact(spread):
    logits = random_logits(len(SETS), 700, seed=4, spread=spread)
    for case, own in zip(SETS, logits, strict=True):
        params = SamplingParams(**case)
        expected = plain_probabilities(own.double().numpy(), params)
        assert reachable(own, params) == set(np.nonzero(expected)[0].tolist()), case


def test_draws_stay_in_the_set_and_reach_all_of_it():
    logits = random_logits(1, 40, seed=9, spread=1.0)
    for case in SETS:
        params = SamplingParams(**case, max_tokens=99)
        expected = set(np.nonzero(plain_probabilities(logits[0].double().numpy(), params))[0].tolist())
        rows = [row(seed=s, **case) for s in range(3000)]
        drawn = set(tokens(logits.expand(3000, -1), rows))
        assert drawn <= expected, case
        if len(expected) <= 8:
            assert drawn == expected, case


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("vocab", [50, 5000])
def test_draws_on_the_host_equal_those_on_a_device(spread, vocab):
    """The path of a GPU, run on the CPU, chooses the same tokens: 1,700 draws of all kinds."""
    kinds = [SamplingParams(**case) for case in [*SETS, {}]] * 100
    logits = random_logits(len(kinds), vocab, seed=vocab, spread=spread)
    logits[::3] = logits[::3].round()  # ties
    logits[::5, 3] = -torch.inf
    rows = [SamplingRow(params, [0], 1, seed) for seed, params in enumerate(kinds)]
    temperature = torch.tensor([params.temperature for params in kinds])
    device = draw(logits, kinds, temperature, [stream_key(seed, 1) for seed in range(len(kinds))])
    assert tokens(logits, rows) == device.tolist()


def test_ties_with_the_last_admitted_token_are_admitted():
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, -5.0])
    assert reachable(logits, SamplingParams(top_k=2)) == {0, 1, 2, 3}
    assert reachable(torch.zeros(1000), SamplingParams(top_p=0.01)) == set(range(1000))


def test_rows_of_a_batch_do_not_mix():
    """Every kind of row together with every other gives the same as alone."""
    kinds = [*SETS, {"temperature": 0}, {"logit_bias": {3: 5.0}}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {}]
    logits = random_logits(len(kinds), 700, seed=2)
    rows = [row(prompt=[1, 2, 3], output=[3, 4], seed=i, **kind) for i, kind in enumerate(kinds)]
    together = sample(logits, rows)
    for i, kind in enumerate(kinds):
        assert sample(logits[i : i + 1], [rows[i]])[0].token_id == together[i].token_id, kind


@pytest.mark.parametrize(
    "case", [{}, {"temperature": 0.7}, {"temperature": 2.0}, {"top_p": 0.8}, {"top_k": 5}], ids=str
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(case, vary):
    """Chi-square over 20,000 draws; the bound is five standard deviations above the mean."""
    count, vocab, seed = 20_000, 12, 1234
    logits = random_logits(1, vocab, seed=seed, spread=1.0)
    if vary == "seed":
        rows = [row(prompt=[0], seed=seed + i, **case) for i in range(count)]
    else:
        rows = [SamplingRow(SamplingParams(**case), range(i + 1), 1, seed) for i in range(count)]
    observed = np.bincount(tokens(logits.expand(count, -1), rows), minlength=vocab)
    expected = plain_probabilities(logits[0].double().numpy(), SamplingParams(**case)) * count
    admitted = expected > 0
    assert observed[~admitted].sum() == 0
    chi = ((observed - expected)[admitted] ** 2 / expected[admitted]).sum()
    freedom = admitted.sum() - 1
    print(f"seed {seed}: chi-square {chi:.1f} at {freedom} degrees of freedom")
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_draw_depends_on_seed_and_position_only():
    logits = random_logits(1, 500, seed=3, spread=1.0)

    def draw(prompt, output, seed):
        return tokens(logits, [row(prompt, output, seed)])[0]

    first = draw([1, 2, 3], [], 7)
    assert draw([9, 9, 9], [], 7) == first
    assert draw([1], [2, 3], 7) == first, "a resumed request: what was output is prompt now"
    own_seed = SamplingRow(SamplingParams(seed=7), [1, 2, 3], 3, seed=8)
    assert tokens(logits, [own_seed])[0] == first, "params.seed goes before the row's"
    assert len({draw([1, 2, 3], [], s) for s in range(50)}) > 10
    assert len({draw([1] * n, [], 7) for n in range(1, 50)}) > 10


def test_uniform_is_a_fixed_function_in_the_unit_interval():
    """The literal keeps streams equal between versions and nodes."""
    values = [uniform(seed, position, b"draw") for seed in range(-50, 50) for position in range(20)]
    assert all(0 <= v < 1 for v in values)
    assert len(set(values)) == len(values)
    assert uniform(1, 2, b"draw") == pytest.approx(UNIFORM_1_2, abs=1e-15)
    assert uniform(-(2**63), 0, b"draw") != uniform(2**63 - 1, 0, b"draw")


UNIFORM_1_2 = 0.728788202306945


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.9},
        {"presence_penalty": -1.1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.6},
        {"logit_bias": {0: 4.0, 5: -100.0, 6: 1.5}},
        {"logit_bias": {2: 1.0}, "repetition_penalty": 2.0, "presence_penalty": 1.0},
        {"min_tokens": 5, "stop_token_ids": (4, 5)},
        {"min_tokens": 5, "ignore_eos": True},
        {"min_tokens": 4},
        {"bad_words": ((3,), (7, 8), (9, 3, 1)), "min_tokens": 5},
        {"allowed_token_ids": (0, 4, 9, 21)},
        {"allowed_token_ids": (1, 2, 5), "bad_words": ((5,), (6, 1)), "min_tokens": 4, "logit_bias": {2: 3.0}},
        {},
    ],
    ids=str,
)
def test_rules_follow_their_definitions(params):
    """Logits after the rules, seen through the probabilities of many draws' support and the greedy choice."""
    generator = np.random.default_rng(8)
    rows = [
        row(generator.integers(0, 30, 12).tolist(), generator.integers(0, 30, n).tolist(), eos_ids=(1, 2), **params)
        for n in (0, 3, 4, 5, 9)
    ]
    logits = random_logits(len(rows), 30, seed=6)
    before = logits.clone()
    changed = apply_rules(logits, rows)
    assert torch.equal(logits, before), "the caller's logits stay raw"
    for own, r, ours in zip(logits, rows, changed, strict=True):
        expected = plain_rules(own.double().numpy(), r)
        np.testing.assert_allclose(ours.double().numpy(), expected, rtol=1e-5, atol=1e-5)
    greedy = [row(r.token_ids[:12], r.token_ids[12:], eos_ids=(1, 2), temperature=0, **params) for r in rows]
    assert tokens(logits, greedy) == changed.argmax(-1).tolist()


def test_min_tokens_holds_off_every_end():
    logits = torch.zeros(1, 6)
    logits[0, :3] = 50.0
    ends = {"min_tokens": 2, "stop_token_ids": (1,)}
    assert tokens(logits, [row([0], [], eos_ids=(0, 2), temperature=0, **ends)])[0] >= 3
    assert tokens(logits, [row([0], [5, 5], eos_ids=(0, 2), temperature=0, **ends)])[0] < 3
    assert tokens(logits, [row([0], [], eos_ids=(0,), temperature=0, ignore_eos=True, **ends)])[0] == 0


def test_a_bad_word_is_known_by_its_beginning():
    logits = torch.zeros(1, 6)
    logits[0, 4], logits[0, 5] = 50.0, 40.0
    bad = {"bad_words": ((2, 3, 4), (5,)), "temperature": 0}
    assert tokens(logits, [row([0], [], **bad)]) == [4]
    assert tokens(logits, [row([2, 3], [], **bad)]) == [4], "only the output counts"
    assert tokens(logits, [row([0], [1, 2, 3], **bad)])[0] not in (4, 5)
    assert tokens(logits, [row([0], [2, 3, 1], **bad)]) == [4]


def test_of_allowed_tokens_one_is_taken_even_if_all_are_banned():
    logits = random_logits(1, 10)
    only = {"allowed_token_ids": (7, 3), "temperature": 0}
    assert tokens(logits, [row([0], bad_words=((7,),), **only)]) == [3]
    assert tokens(logits, [row([0], bad_words=((7,), (3,)), **only)])[0] in (7, 3)
    assert set(tokens(logits.repeat(50, 1), [row([0], allowed_token_ids=(7, 3), seed=n) for n in range(50)])) <= {7, 3}
    with pytest.raises(ValueError, match="allowed_token_ids must be absent with structured output"):
        SamplingParams(grammar="x", allowed_token_ids=(1,))


def test_ids_outside_of_the_vocabulary_harm_nobody():
    logits = random_logits(2, 10)
    rows = [row([0], temperature=0, logit_bias={99: 5.0, -1: 9.0}, stop_token_ids=(77,), min_tokens=3)] * 2
    assert tokens(logits, rows) == logits.argmax(-1).tolist()


def test_logprobs_are_raw_best_first_and_sum_to_one():
    logits = random_logits(4, 15, seed=1)
    full = [row([1], [2], temperature=0.5, logit_bias={3: -100.0}, top_k=2, logprobs=n, seed=n) for n in (15, 0, 3)]
    sampled = sample(logits, [*full, row([1])])
    raw = logits.double().log_softmax(-1)
    for i, count in enumerate((15, 0, 3)):
        logprobs = sampled[i].logprobs
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(raw[i, sampled[i].token_id].item(), abs=1e-5)
        assert len(logprobs.top) == count
        values = [value for _, value in logprobs.top]
        assert values == sorted(values, reverse=True)
        for token, value in logprobs.top:
            assert value == pytest.approx(raw[i, token].item(), abs=1e-5)
    top = sampled[0].logprobs.top
    assert sum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5)
    assert sampled[3].logprobs is None


def test_equal_logprobs_are_ordered_by_token():
    (sampled,) = sample(torch.zeros(1, 6), [row([1], temperature=0, logprobs=6)])
    assert [token for token, _ in sampled.logprobs.top] == list(range(6))
    assert sampled.token_id == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-3])
def test_tiny_temperatures_are_greedy(temperature):
    logits = random_logits(20, 300, spread=30.0)
    rows = [row(seed=i, temperature=temperature) for i in range(20)]
    assert tokens(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e39},
        {"temperature": 1e300, "top_p": 0.5},
        {"repetition_penalty": 1e-46},
    ],
)
def test_numbers_beyond_float32_let_no_banned_token_through(params):
    rows = [row(range(8), seed=seed, allowed_token_ids=(5, 6), **params) for seed in range(40)]
    logits = random_logits(1, 20).abs().repeat(40, 1)
    logits[:, 6] = logits[:, 5]
    chosen = tokens(logits, rows)
    assert set(chosen) == {5, 6}
    keys = [stream_key(row.seed, 8) for row in rows]
    temperature = _temperature(logits, [row.params for row in rows])
    assert chosen == draw(apply_rules(logits, rows), [row.params for row in rows], temperature, keys).tolist()


def test_not_a_number_gives_a_token_of_the_vocabulary():
    logits = torch.full((4, 9), torch.nan)
    rows = [row(), row(temperature=0), row(top_p=0.5), row(top_k=3, min_p=0.1)]
    assert all(0 <= token < 9 for token in tokens(logits, rows))
