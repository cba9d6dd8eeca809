"""The errors of the last minutes: means over requests, shares only where they say something."""

from __future__ import annotations

import pytest

from engine.observe.estimate_errors import WINDOW_S, EstimateErrors, merged
from engine.observe.truth import compare

SUMMARY = {
    "decision_to_token_ms": 100.0, "queue_ms": 0.35, "prefix_fetch_ms": 0.0, "prefill_ms": 80.0,
    "other_prompts_ms": 0.0, "transfer_ms": 40.0, "decode_ms": 90.0, "output_tokens": 10,
}  # fmt: skip


def truth(**estimates: float):
    return compare(SUMMARY, estimates)


def test_a_fraction_of_a_millisecond_has_no_share():
    found = truth(wait_s=0.0, ttft_s=0.05)
    assert found["wait_s"]["error"] is None and found["wait_s"]["error_s"] == pytest.approx(0.00035)
    assert found["ttft_s"]["error"] == pytest.approx(0.5) and found["ttft_s"]["error_s"] == pytest.approx(0.05)
    assert truth(wait_s=0.01)["wait_s"]["error"] == pytest.approx(9.65), "a wait that was expected and did not come"
    assert truth(handover_s=0.05)["handover_s"]["error"] == pytest.approx(0.25), "of the whole transfer, hidden or not"


def test_means_over_the_requests_of_the_window():
    errors = EstimateErrors()
    errors.add(0.0, truth(ttft_s=99.0))
    for ended, ttft_s in ((10.0, 0.05), (20.0, 0.11), (30.0, 0.1)):
        errors.add(ended, truth(ttft_s=ttft_s, wait_s=0.0))
    errors.add(40.0, {})  # it was placed again
    assert errors.at(0.0)["ttft_s"]["requests"] == 4
    now = errors.at(WINDOW_S + 5.0)
    assert now["ttft_s"] == {
        "requests": 3, "shares": 3, "error_s": pytest.approx(0.02), "mape": pytest.approx(0.2),
    }  # fmt: skip
    assert now["wait_s"]["shares"] == 0 and now["wait_s"]["mape"] is None
    assert errors.at(2 * WINDOW_S) == {}


def test_the_errors_of_several_nodes_are_those_of_all_their_requests():
    alone, first, second = EstimateErrors(), EstimateErrors(), EstimateErrors()
    for i, estimates in enumerate(({"ttft_s": 0.05, "wait_s": 0.0}, {"ttft_s": 0.2}, {"ttft_s": 0.1, "wait_s": 0.004})):
        alone.add(1.0, truth(**estimates))
        (second if i else first).add(1.0, truth(**estimates))
    both, of_all = merged([first.at(1.0), {}, second.at(1.0)]), alone.at(1.0)
    assert both.keys() == of_all.keys()
    for name, one in of_all.items():
        assert both[name] == {key: pytest.approx(value) for key, value in one.items()}
