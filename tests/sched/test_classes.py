"""Objectives as --slo takes them, and who goes by them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sched.classes import CLASSES, spell, with_objectives
from sched.queueing import queue_orders
from sched.rejection import Estimate, rejections


def test_what_is_not_named_keeps_its_default():
    assert with_objectives("") == CLASSES
    found = with_objectives(" interactive:ttft=0.5,tbt=0.1; batch:ttft=60")
    assert (found["interactive"].ttft_s, found["interactive"].tbt_s, found["interactive"].weight) == (0.5, 0.1, 8)
    assert (found["batch"].ttft_s, found["batch"].tbt_s) == (60.0, CLASSES["batch"].tbt_s)
    assert found["standard"] == CLASSES["standard"] and [*found] == [*CLASSES]


def test_it_is_read_as_it_is_spelled():
    classes = with_objectives("standard:tbt=0.25;batch:ttft=90")
    assert with_objectives(spell(classes)) == classes and spell(with_objectives(spell(CLASSES))) == spell(CLASSES)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("urgent:ttft=1", "no class 'urgent'; the classes are interactive, standard, batch"),
        ("batch", "names no objective; write batch:ttft=SECONDS"),
        ("batch:", "names no objective"),
        ("batch:tpot=1", "no objective 'tpot'; the objectives are ttft and tbt"),
        ("batch:ttft=0", "'ttft=0' is not a number of seconds above 0"),
        ("batch:ttft=soon", "is not a number"),
        ("batch:ttft=nan", "is not a number"),
    ],
)
def test_what_is_wrong_is_said(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        with_objectives(text)


def test_every_rejection_goes_by_them():
    lax, strict = with_objectives("interactive:ttft=99,tbt=99"), with_objectives("interactive:ttft=0.1,tbt=0.001")
    late = Estimate(
        service_class="interactive", ttft_s=3.0, wait_s=2.5, step_s=0.04, step_soon_s=0.04, step_alone_s=0.01,
        decode_s=1.0,
    )  # fmt: skip
    for name in set(rejections) - {"none"}:
        assert rejections[name](lax).at_arrival(late) is None
        refusal = rejections[name](strict).at_arrival(late)
        assert refusal is not None and refusal.limit_s == 0.1
    after = rejections["stage-load"](strict).after_prefill("interactive", 0.04, 0.01, 1.0)
    assert after is not None and after.limit_s == 0.001
    assert rejections["stage-load"](lax).after_prefill("interactive", 0.04, 0.01, 1.0) is None


@dataclass
class Job:
    service_class: str
    arrival: float = 0.0
    num_uncomputed: int = 100


@pytest.mark.parametrize("name", ["edf", "srpt"])
def test_orders_by_objective_go_by_them(name):
    jobs = [Job("interactive", num_uncomputed=100), Job("batch", num_uncomputed=100)]
    swapped = with_objectives("interactive:ttft=50;batch:ttft=1")
    assert [job.service_class for job in queue_orders[name]().order(5.0, jobs)] == ["interactive", "batch"]
    assert [job.service_class for job in queue_orders[name](swapped).order(5.0, jobs)] == ["batch", "interactive"]
