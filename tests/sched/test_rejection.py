from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sched.classes import CLASSES, scaled
from sched.rejection import Estimate, OutputLengths, rejections, running_soon


def estimate(**values) -> Estimate:
    usual = {
        "service_class": "interactive", "ttft_s": 0.5, "wait_s": 0.4, "step_s": 0.02, "step_soon_s": 0.02,
        "step_alone_s": 0.01, "decode_s": 4.0,
    }  # fmt: skip
    return Estimate(**(usual | values))


LATE = estimate(ttft_s=4.2, wait_s=4.0)
SLOW_NOW = estimate(step_s=0.09)
SLOW_THEN = estimate(step_soon_s=0.09)


@pytest.mark.parametrize(
    ("name", "refused"),
    [("none", ""), ("stage-load", "late"), ("early", "late now"), ("predicted", "late then")],
)
def test_each_variant_looks_at_its_own_load(name, refused):
    rejection = rejections[name]()
    for case, one in {"late": LATE, "now": SLOW_NOW, "then": SLOW_THEN}.items():
        assert (rejection.at_arrival(one) is not None) == (case in refused.split()), case
    assert rejection.at_arrival(estimate()) is None
    late = rejection.after_prefill("interactive", 0.09, 0.01, 8.0)
    assert (late is not None) == (name == "stage-load")
    if late is not None:
        assert late.retry_after_s == 4.0, "half of what runs must end: 8 s * 0.04 / 0.08"
        assert (late.objective, late.estimated_s, late.limit_s) == ("tbt", 0.09, 0.05)


def test_retry_after_is_when_the_objective_would_be_met():
    refusal = rejections["early"]().at_arrival(LATE)
    assert refusal.retry_after_s == 4.0 and "interactive is 1.00 s" in refusal.reason  # 3.2 s of queue must go
    refusal = rejections["early"]().at_arrival(SLOW_NOW)
    assert refusal.retry_after_s == 2.0  # half of what runs must end: 4 s * 0.04 / 0.08


def test_what_no_waiting_improves_is_not_refused():
    early = rejections["early"]()
    assert early.at_arrival(estimate(ttft_s=30.0, wait_s=0.0)) is None, "a long prompt on an idle node"
    assert early.at_arrival(estimate(step_s=0.2, step_alone_s=0.2)) is None, "a slow node"


def test_classes_and_scale_set_the_objective():
    early, scaled_up = rejections["early"](), rejections["early"](scaled(CLASSES, 1.2))
    for name, service_class in CLASSES.items():
        just = estimate(service_class=name, ttft_s=service_class.ttft_s * 1.1, wait_s=9.0, step_s=0.02)
        assert early.at_arrival(just) is not None
        assert scaled_up.at_arrival(just) is None
    slow = rejections["early"](scaled(CLASSES, 1.0, 0.1)).at_arrival(estimate())
    assert slow is not None and (slow.objective, slow.limit_s) == ("tbt", pytest.approx(0.005))


@given(st.sampled_from(sorted(rejections)), st.sampled_from(sorted(CLASSES)), *[st.floats(0, 500)] * 6)
def test_a_refusal_names_a_time_within_bounds(name, service_class, ttft, wait, step, soon, alone, decode):
    one = Estimate(
        service_class=service_class, ttft_s=ttft, wait_s=wait, step_s=step, step_soon_s=soon, step_alone_s=alone,
        decode_s=decode,
    )  # fmt: skip
    refusal = rejections[name]().at_arrival(one)
    assert refusal is None or (1 <= refusal.retry_after_s <= 60 and refusal.retry_after_s == int(refusal.retry_after_s))


def test_who_decodes_soon():
    """Expected 100 tokens at 10 ms: those that are through in a second leave, those on their way come."""
    assert running_soon([5, 50, 95], 2, 100, 0.01, 0.06, 64) == 4
    assert running_soon([5, 50, 95], 2, 100, 0.01, 0.6, 64) == 3
    assert running_soon([5, 50, 95], 0, 100, 0.01, 0.0, 64) == 3
    assert running_soon([], 8, 100, 0.01, 4.0, 64) == 2, (
        "decodes of 1 s: of those that come within 4 s, the last quarter"
    )
    assert running_soon([100, 300], 0, 100, 0.01, 9.0, 64) == 2, "who has outlived the expectation goes on"
    assert running_soon([5] * 9, 9, 100, 0.01, 0.0, 8) == 8, "seats are limited"


def test_output_lengths_follow():
    lengths = OutputLengths()
    assert lengths.mean == 128
    for _ in range(200):
        lengths.ended(40)
    assert lengths.mean == pytest.approx(40, abs=1)
