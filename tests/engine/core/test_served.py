"""What requests wait for beyond the steps: learned, and only then in the estimates."""

from __future__ import annotations

import pytest

from engine.core.costs import StepCosts
from engine.core.served import MAX_BEGUN, TOKENS, Served
from engine.sampling.params import SamplingParams
from engine.step.cold import Cold
from engine.step.request import Request
from engine.step.step import ScheduledRow, Step


def second(features: tuple[float, float, float]) -> float:
    """A prefill model: seconds are the second feature."""
    return features[1]


def test_without_a_request_the_estimates_are_those_of_the_steps():
    served = Served()
    assert served.first_tokens_s(1, 0.25) == 0.25 and served.next_token_s(0.01) == 0.01
    assert served.prefill((1.0, 2.0, 3.0)) == (1.0, 2.0, 3.0)


def test_the_time_to_the_first_token_includes_what_happens_around_the_steps():
    served = Served()
    for i in range(64):
        estimated_s, begin = 0.02 + 0.01 * (i % 8), 10.0 * i
        served.computed(str(i), begin, (1.0, estimated_s / 4, 0.0), 0.0)
        served.computed(str(i), begin + 0.1, (1.0, 3 * estimated_s / 4, 0.0), 0.0)
        served.handed_out(str(i), begin + 0.01 + 1.5 * estimated_s, second)
        served.handed_out(str(i), begin + 5.0, second)  # its second token
    assert served.first_tokens_s(2, 0.05) == pytest.approx(0.085, rel=0.02)
    assert served.first_tokens_s(1, 0.05) == pytest.approx(0.08, rel=0.02)
    a0, a1, a2 = served.prefill((0.001, 1e-4, 1e-9))
    assert a0 + 300 * a1 == pytest.approx(served.first_tokens_s(1, 0.001 + 300e-4), rel=1e-9)
    assert a2 == pytest.approx(1.5e-9, rel=0.05)


def test_the_share_of_other_prompts_is_none_of_the_time_to_the_first_token():
    """Two prompts in every step: each is handed out after the work of both."""
    served = Served()
    for i in range(0, 128, 2):
        estimated_s = 0.02 + 0.01 * (i % 8)
        for name in (str(i), str(i + 1)):
            served.computed(name, float(i), (1.0, estimated_s, 0.0), estimated_s)
        for name in (str(i), str(i + 1)):
            served.handed_out(name, i + 2 * estimated_s, second)
    assert served.first_tokens_s(1, 0.05) == pytest.approx(0.05, rel=0.02)
    assert served.first_tokens_s(4, 0.2) == pytest.approx(0.2, rel=0.02)


def test_what_a_prompt_lost_to_others_is_none_of_the_time_to_its_first_token():
    """Steps between two of its own, which computed a higher class or gave way to one."""
    served = Served()
    for i in range(64):
        estimated_s, others_s = 0.02 + 0.01 * (i % 8), 0.1 * (i % 5)
        served.lost(str(i), 3.0)  # before its first step it only waits for its turn
        served.computed(str(i), float(i), (1.0, estimated_s / 2, 0.0), 0.0)
        served.lost(str(i), others_s)
        served.computed(str(i), i + 0.5, (1.0, estimated_s / 2, 0.0), 0.0)
        served.handed_out(str(i), i + estimated_s + others_s, second)
    assert served.first_tokens_s(2, 0.05) == pytest.approx(0.05, rel=0.02)


def test_the_time_between_tokens_includes_the_prompts_between_two_steps():
    served = Served()
    end = 0.0
    for _ in range(200):
        end += 0.03  # a step of 10 ms, and 20 ms of prompts
        served.decoded(["a", "b"], end, 0.01, 2)
    assert served.next_token_s(0.01) == pytest.approx(0.03, rel=0.02)


def test_few_long_gaps_between_tokens_count_in_full():
    """One gap in ten waits for a prompt of 110 ms: a robust fit over gaps would take it for an outlier."""
    served = Served()
    end = 0.0
    for i in range(400):
        end += 0.01 + 0.11 * (i % 10 == 0)
        served.decoded(["a", "b"], end, 0.01, 2)
    assert served.next_token_s(0.01) == pytest.approx(0.021, rel=0.1)


def test_a_pause_without_requests_is_no_time_between_tokens():
    served = Served()
    for i in range(100):
        served.decoded([f"r{i}"], 10.0 * i, 0.01, 1)
    assert served.next_token_s(0.01) == 0.01


def test_with_drafts_the_time_of_a_step_is_shared_by_its_tokens():
    served = Served()
    for i in range(100):
        served.decoded(["a", "b"], 0.03 * i, 0.02, 6)
    assert served.next_token_s(0.02) == pytest.approx(0.01, rel=0.02)


def test_aborted_prompts_do_not_accumulate():
    served = Served()
    for i in range(2 * MAX_BEGUN):
        served.computed(str(i), 0.0, (1.0, 1.0, 0.0), 0.0)
    assert len(served._begun) == MAX_BEGUN
    served.handed_out("0", 5.0, second)
    assert served.first.observations == 0


def request(name: str, tokens: int) -> Request:
    return Request(name, [1] * tokens, tokens, SamplingParams(), 0.0, bytes(16))


def test_a_node_whose_prompts_never_have_a_step_to_themselves_learns_their_time():
    """On a busy mixed node no step updates the prefill model, because all contain decodes."""
    costs, stream = StepCosts(), request("stream", 100)
    wrong = costs.prefill.estimate(200)
    now = 0.0
    for i in range(40):
        prompt = request(f"p{i}", 200)
        step = Step([ScheduledRow(stream, 99, 1, True), ScheduledRow(prompt, 0, 200, True)])
        costs.ran(step, now, [0.0, 0.0])
        costs.observe(step, 4 * wrong)
        costs.decoded(step, now, now + 4 * wrong, 1)
        costs.handed_out(prompt.request_id, now + 4 * wrong)
        now += 4 * wrong
    assert costs.prefill.estimate(200) == wrong
    a0, a1, a2 = costs.prompt_coefficients
    assert a0 + 200 * a1 + 200 * 200 * a2 == pytest.approx(4 * wrong, rel=0.05)
    assert costs.prefill_left(request("new", 200), 4096) == pytest.approx(4 * wrong, rel=0.05)
    assert costs.token_s(1, 100) == pytest.approx(4 * wrong, rel=0.05)


@pytest.mark.parametrize("wrong", [3.0, 1.4, 0.7])
def test_equal_prompts_while_the_model_learns(wrong):
    """The model's estimates from before its correction do not count, and a prompt of many steps is no exception."""
    costs = StepCosts()
    for tokens in (32, 64, 128):
        for _ in range(4):
            costs.prefill.regression.calibrate((1.0, tokens, tokens * tokens), wrong * (0.03 + 0.001 * tokens))
    now, true_s = 0.0, 12 * 0.03 + 1.536
    for i in range(8):
        prompt, now = request(f"p{i}", 12 * 128), now + 1
        for start in range(0, 12 * 128, 128):
            step = Step([ScheduledRow(prompt, start, 128, start == 11 * 128)])
            costs.ran(step, now, [0.0])
            now += true_s / 12
            costs.observe(step, true_s / 12)
        costs.handed_out(prompt.request_id, now + 0.002)
        estimate = costs.prefill_left(request("new", 12 * 128), 128)
        assert estimate == pytest.approx(true_s, rel=0.15), f"after {i + 1} prompts"


@pytest.mark.parametrize("layers, seconds", [(range(8), 0.013), (range(4), 0.01)])
def test_a_token_beyond_memory_takes_its_step_and_what_is_between_two_steps(layers, seconds):
    """Not if its steps pass only some layers, because others run too: it rests between them."""
    costs, alone = StepCosts(), request("long", 100)
    alone.cold = Cold(4, 0, 16, num_layers=8)
    for i in range(4 * TOKENS):
        step = Step([ScheduledRow(alone, 99, 1, True, layers=layers)])
        costs.decoded(step, 0.013 * i, 0.013 * i + 0.01, 1)
    assert costs.served.next_token_s(0.01) == pytest.approx(seconds, rel=0.02)


def test_prompts_of_one_step_share_its_time_by_their_tokens():
    costs, now = StepCosts(), 0.0
    for i in range(40):
        prompts = [request(f"{i} {tokens}", tokens) for tokens in (100, 300)]
        step = Step([ScheduledRow(prompt, 0, prompt.num_tokens, True) for prompt in prompts])
        costs.observe(step, 0.4)
        costs.ran(step, now, [0.4 * share for share in step.other_prompts()])
        now += 0.4
        for prompt in prompts:
            costs.handed_out(prompt.request_id, now)
    for tokens in (100, 300):
        assert costs.prefill_left(request("new", tokens), 4096) == pytest.approx(tokens / 1000, rel=0.1)


def drafting(tokens: int, drafts: int) -> Step:
    """A step in which a stream verifies drafts."""
    return Step([ScheduledRow(request("stream", tokens), tokens - 1, 1 + drafts, True, drafts, [1] * drafts)])


def test_steps_that_always_verify_drafts_are_estimated_by_themselves():
    """A node that drafts in every step, and was not calibrated, has never measured a plain step."""
    costs = StepCosts()
    for _ in range(40):
        costs.prefill.observe(200, 0, 0.2)
    for _ in range(12):  # a slow machine, for a while
        costs.observe(Step([ScheduledRow(request("prompt", 200), 0, 200, True)]), 0.8)
    assert costs.residual > 1.5
    for tokens in range(100, 180):
        costs.observe(drafting(tokens, 4), 0.003)
    assert costs.residual == pytest.approx(1.0, abs=0.1)
    costs.started(drafting(180, 4), 50.0)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), 50.0) == pytest.approx(0.003, rel=0.1)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), 50.004) == 0.0
    costs.started(drafting(180, 4), 60.0, drafting_s=0.002)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), 60.0) == pytest.approx(0.005, rel=0.1)


def test_the_work_of_a_queue_ends_while_its_first_step_runs():
    costs, now = StepCosts(), 0.0
    stream, prompt, next_one = request("stream", 100), request("a", 200), request("b", 200)
    for _ in range(64):
        costs.prefill.observe(200, 0, 0.2)
        costs.decode.observe(1, 100, 0.01)
    left = tuple(2 * x for x in costs.left_features(prompt, 4096))
    assert costs.queued_s(2, left, now) == pytest.approx(0.4, rel=0.05)
    costs.started(Step([ScheduledRow(prompt, 0, 200, True)]), now)
    assert costs.queued_s(2, left, now) == pytest.approx(0.4, rel=0.05)
    assert costs.queued_s(2, left, now + 0.15) == pytest.approx(0.25, rel=0.05)
    assert costs.queued_s(2, left, now + 9.0) == pytest.approx(0.2, rel=0.05), "a late step has no work left"
    costs.started(Step([ScheduledRow(stream, 99, 1, True)]), now)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), now + 0.004) == pytest.approx(0.006, rel=0.05)
    costs.started(None, now)
    assert costs.queued_s(0, (0.0, 0.0, 0.0), now) == 0.0
    assert costs.queued_s(1, costs.left_features(next_one, 4096), now) == pytest.approx(0.2, rel=0.05)
