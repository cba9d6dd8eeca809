"""What an acceptor learns about a worker from the times of its answers, and what follows for placement."""

from __future__ import annotations

import random

import pytest

from engine.backends.load import KNOWN, MANY_BLOCKS, Costs, Load
from engine.backends.told import Told, told


def test_the_cost_of_a_prompt_is_learned_from_a_queue():
    """A worker that takes 5 ms and 0.1 ms per token, one prompt after another."""
    rng, load, now, free = random.Random(1), Load(), 0.0, 0.0
    for number in range(60):
        now += rng.random() * 0.1
        tokens = rng.randrange(100, 2000)
        cached = rng.randrange(0, tokens, 16)
        free = max(free, now) + 0.005 + 1e-4 * (tokens - cached)
        load.sent(str(number), now, tokens, cached)
        load.token(str(number), free)
        load.ended(str(number), free)
    a0, a1, _ = load.prefill.coefficients
    assert a0 + 1000 * a1 == pytest.approx(0.105, rel=0.25)
    assert load.prefill.estimate(1000) == pytest.approx(0.105, rel=0.2)


def test_prompts_of_one_step_are_one_measurement():
    load = Load()
    for name in "ab":
        load.sent(name, 0.0, 500, 0)
    load.token("a", 0.2)
    load.token("b", 0.2001)
    load.candidate("w", 1.0, 16)
    assert load.own.prefill.regression.observations == 1
    assert load.prefill.estimate(1000) == pytest.approx(0.2, rel=0.05)


def test_the_time_of_a_step_is_learned():
    load, now = Load(), 0.0
    for name in "abcd":
        load.sent(name, now, 100, 0)
        load.token(name, now + 0.01)
    for _ in range(40):
        now += 0.03
        for name in "abcd":
            load.token(name, now)
    assert load.candidate("w", now, 16).step_s == pytest.approx(0.03, rel=0.5)
    for name in "abcd":
        load.ended(name, now)
    one = load.candidate("w", now, 16)
    assert one.running == 0 and one.decode_s > 0.5


def test_workers_are_equal_until_they_have_been_measured():
    common = Costs()
    slow, other = Load(common), Load(common)
    for number in range(KNOWN):
        now = 10.0 * number
        assert slow.prefill.coefficients == other.prefill.coefficients
        slow.sent("a", now, 1000, 0)
        slow.token("a", now + 1.0)
        slow.ended("a", now + 1.0)
    slow.candidate("w", 1e6, 16)
    other.sent("b", 0.0, 1000, 0)
    other.token("b", 0.1)
    other.candidate("w", 1e6, 16)
    assert slow.prefill is slow.own.prefill and other.prefill is common.prefill


def test_work_shrinks_while_the_first_prompt_is_computed():
    load = Load()
    load.sent("a", 10.0, 1000, 0)
    each = load.prefill.estimate(1000)
    load.sent("b", 10.0, 1000, 0)
    assert load.work_s(10.0) == pytest.approx(2 * each)
    assert load.work_s(10.0 + each / 2) == pytest.approx(1.5 * each)
    assert load.work_s(10.0 + 5 * each) == pytest.approx(each)
    load.ended("b", 10.0)
    assert load.work_s(10.0) == pytest.approx(each)
    load.ended("a", 10.0)
    assert load.work_s(10.0) == 0.0


def test_requests_of_others_count():
    load = Load()
    load.sent("a", 0.0, 100, 0)
    load.token("a", 0.1)
    load.tells(1.0, Told(running=3, waiting=4, usage=0.25, block_size=32, blocks=100))
    one = load.candidate("w", 1.0, 16)
    assert (one.running, one.waiting) == (3, 4)
    assert (one.total_blocks, one.free_blocks) == (200, 150)
    assert one.wait_s > 0


def test_a_worker_that_tells_nothing_has_room():
    assert Load().candidate("w", 0.0, 16).free_blocks == MANY_BLOCKS


def test_the_metrics_of_all_engines_of_a_worker():
    page = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.125
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="10"} 1.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="1",num_gpu_blocks="10"} 1.0
process_start_time_seconds 1.7e+09
"""
    assert told(page) == Told(3, 5, 0.5, 128, 20, 1.7e9)
    assert told("") == Told()
