from __future__ import annotations

import random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from sched.cost import DecodeModel, PrefillModel, Regression, TransferModel, prefill_seconds


@pytest.mark.parametrize("truth", [(5e-3, 2e-4, 3e-9), (1e-4, 1e-5, 1e-10), (0.1, 5e-3, 1e-7)])
@pytest.mark.parametrize("number", range(3))
def test_prefill_model_recovers_the_machine_under_noise(truth, number):
    print("seed", number)
    rng = random.Random(number)
    model = PrefillModel()
    for _ in range(300):
        n, context = int(2 ** rng.uniform(4, 14)), rng.choice([0, 0, 512, 4096, 32768])
        model.observe(n, context, prefill_seconds(truth, n, context) * rng.lognormvariate(0, 0.05))
    for n in (32, 256, 2048, 16384):
        for context in (0, 4096, 65536):
            assert model.estimate(n, context) == pytest.approx(prefill_seconds(truth, n, context), rel=0.1)
    assert model.regression.error < 0.1
    assert model.coefficients == pytest.approx(truth, rel=0.35)


def test_decode_and_transfer_models_recover_their_coefficients():
    rng = random.Random(7)
    decode, transfer = DecodeModel(), TransferModel()
    for _ in range(300):
        batch = rng.randint(1, 64)
        context = batch * rng.randint(10, 4000)
        decode.observe(batch, context, (0.02 + 3e-4 * batch + 2e-8 * context) * rng.lognormvariate(0, 0.03))
        nbytes = int(2 ** rng.uniform(10, 28))
        transfer.observe(nbytes, (2e-4 + nbytes / 3e9) * rng.lognormvariate(0, 0.03))
    assert decode.estimate(32, 32 * 1000) == pytest.approx(0.02 + 3e-4 * 32 + 2e-8 * 32000, rel=0.05)
    assert transfer.latency_s == pytest.approx(2e-4, rel=0.1)
    assert transfer.bytes_per_s == pytest.approx(3e9, rel=0.1)
    assert transfer.estimate(0) == 0.0


def test_without_observations_the_prior_speaks():
    assert PrefillModel((1e-3, 1e-4, 1e-9)).estimate(1000) == pytest.approx(1e-3 + 0.1 + 1e-3)
    assert DecodeModel((0.01, 0.001, 1e-6)).estimate(3, 1000) == pytest.approx(0.014)


def test_one_observation_scales_the_prior():
    model = PrefillModel((1e-3, 1e-4, 1e-9))
    before = [model.estimate(n) for n in (10, 1000, 20000)]
    model.observe(1000, 0, 7 * model.estimate(1000))
    assert [model.estimate(n) for n in (10, 1000, 20000)] == pytest.approx([7 * t for t in before], rel=1e-6)


def test_two_close_observations_do_not_make_wild_extrapolations():
    model = PrefillModel((1e-3, 1e-4, 1e-9))
    model.observe(100, 0, 0.0111)
    model.observe(110, 0, 0.0125)  # five per cent more than the line says
    assert 0.5 < model.estimate(20000) / PrefillModel((1e-3, 1e-4, 1e-9)).estimate(20000) < 3


def test_few_measurements_that_agree_outweigh_the_prior():
    """The steps of an idle check on a slow node: the estimate of a whole chunk follows from them."""
    truth, model = (0.04, 0.00085, 1e-8), PrefillModel()
    for tokens, context in ((16, 0), (64, 0), (32, 256), (16, 0)):
        model.observe(tokens, context, prefill_seconds(truth, tokens, context))
    assert model.estimate(128) == pytest.approx(prefill_seconds(truth, 128), rel=0.2)


def test_equal_observations_are_reproduced():
    model = PrefillModel()
    for _ in range(500):
        model.observe(512, 0, 0.25)
    assert model.estimate(512) == pytest.approx(0.25, rel=1e-3)
    assert 0.05 < model.estimate(256) < 0.25 < model.estimate(1024) < 1.5


def test_the_model_follows_a_machine_that_became_slower():
    model = TransferModel()
    rng = random.Random(1)
    for bandwidth in (1e10, 1e8):
        for _ in range(500):
            nbytes = rng.randint(1 << 16, 1 << 24)
            model.observe(nbytes, 1e-4 + nbytes / bandwidth)
    assert model.bytes_per_s == pytest.approx(1e8, rel=0.1)


def test_a_hiccup_of_the_machine_hardly_moves_the_model():
    model = TransferModel()
    rng = random.Random(2)
    for i in range(100):
        nbytes = rng.randint(1 << 16, 1 << 24)
        model.observe(nbytes, (1e-4 + nbytes / 1e9) * (100 if i % 25 == 7 else 1))
    assert model.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_chunks_add_only_their_fixed_cost():
    model = PrefillModel((1e-3, 1e-4, 1e-9))
    whole = model.estimate(1000, 200)
    parts = model.estimate(600, 200) + model.estimate(400, 800)
    assert parts == pytest.approx(whole + 1e-3)
    assert model.estimate(1000, 200, chunks=2) == pytest.approx(parts)


@seed(4)
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 32768), st.integers(0, 131072), st.floats(1e-5, 100)),
        max_size=30,
    )
)
def test_coefficients_are_never_negative_and_estimates_never_absurd(observed):
    model = PrefillModel()
    for tokens, context, seconds in observed:
        model.observe(tokens, context, seconds)
    assert all(0 <= c < float("inf") for c in model.coefficients)
    times = [model.estimate(n) for n in (1, 64, 4096)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < float("inf")
    if observed:
        assert times[-1] > 0


def test_nonsense_is_refused_with_a_message():
    with pytest.raises(ValueError, match="cannot learn from 0"):
        TransferModel().observe(100, 0)
    with pytest.raises(ValueError, match="positive"):
        Regression((1.0, 0.0))


def test_a_least_first_coefficient_holds_whatever_was_measured():
    """A pass that reads weights takes a time that short steps, right after a pause, do not show."""
    model = PrefillModel((1e-3, 1e-4, 1e-9))
    model.regression.least = 0.5
    assert model.estimate(100, chunks=3) >= 1.5
    for n in (10, 100, 1000) * 20:
        model.observe(n, 0, 1e-3 + 1e-4 * n)
    assert model.coefficients[0] == 0.5 and model.estimate(10) >= 0.5
    assert model.coefficients[1] == pytest.approx(1e-4, rel=0.2)
    model.regression.least = 0.0
    assert model.estimate(10) == pytest.approx(2e-3, rel=0.2)


def test_a_calibration_leads_to_the_same_coefficients_as_observations():
    rng, observed, calibrated = random.Random(3), Regression((1.0, 1.0)), Regression((1.0, 1.0))
    for number in range(9):
        features, seconds = (1.0, rng.uniform(1, 100)), rng.uniform(0.1, 2.0)
        observed.observe(features, seconds)
        calibrated.calibrate(features, seconds)
        assert calibrated.error == 0.0
        if number % 4 == 0:
            assert calibrated.coefficients == observed.coefficients
    with pytest.raises(ValueError, match="cannot learn"):
        calibrated.calibrate((1.0, 1.0), 0.0)


def test_the_window_can_be_read_and_learned_again():
    model = Regression((1.0, 1.0), window=4)
    assert model.observed() == []
    for number in range(1, 7):
        model.observe((1.0, number), 10.0 * number)
    assert model.observed() == [((1.0, float(number)), 10.0 * number) for number in range(3, 7)], "the oldest first"
    again = Regression((1.0, 1.0), window=4)
    for features, seconds in model.observed():
        again.observe(features, seconds)
    assert again.refit() == pytest.approx(model.refit())
