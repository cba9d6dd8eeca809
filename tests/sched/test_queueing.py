"""Queue orders: what each puts first, and that none starves a request whatever arrives after it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sched.classes import CLASSES
from sched.queueing import FCFS, OVERDUE_OBJECTIVES, SRPT, QueueOrder, WeightedFair, queue_orders

STEP_TOKENS = 64
STEP_S = 0.5  # so the server does 128 tokens/s


@dataclass(slots=True)
class Task:
    arrival: float
    service_class: str
    num_uncomputed: int
    size: int = 0

    def __post_init__(self) -> None:
        self.size = self.num_uncomputed


def first(name: str, now: float, *tasks: Task) -> Task:
    return queue_orders[name]().order(now, tasks)[0]


def test_what_each_order_prefers():
    old = Task(0.0, "standard", 100)
    late_chat = Task(3.0, "interactive", 100)
    short = Task(3.5, "standard", 10)
    assert first("fcfs", 4, short, late_chat, old) is old
    assert first("edf", 4, short, late_chat, old) is late_chat  # due at 4, the old one at 5
    assert first("edf", 6, Task(4.5, "interactive", 1), old) is old  # due at 5.5 and at 5
    assert first("srpt", 4, late_chat, old, short) is short
    assert first("weighted-fair", 4, old, short, late_chat) is late_chat  # equal tags: the higher class


@pytest.mark.parametrize("name", queue_orders)
@given(st.lists(st.tuples(st.floats(0, 50), st.sampled_from(list(CLASSES)), st.integers(1, 500)), max_size=12))
def test_an_order_loses_nobody_and_changes_nothing(name, drawn):
    tasks = [Task(*d) for d in drawn]
    order = queue_orders[name]()
    once = order.order(60.0, tasks)
    assert sorted(map(id, once)) == sorted(map(id, tasks))
    assert order.order(60.0, tasks) == once


@pytest.mark.parametrize("name", ["fcfs", "edf", "weighted-fair"])
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 500)), max_size=12))
def test_first_come_first_served_among_one_class(name, drawn):
    tasks = [Task(arrival, "standard", size) for arrival, size in drawn]
    assert queue_orders[name]().order(60.0, tasks) == FCFS().order(60.0, tasks)


def test_overdue_requests_pass_every_short_one():
    order, old = SRPT(), Task(0.0, "interactive", 10_000)
    limit = OVERDUE_OBJECTIVES * CLASSES["interactive"].ttft_s
    assert order.order(limit - 1, [old, Task(limit - 1, "interactive", 1)])[0] is not old
    assert order.order(limit, [old, Task(limit, "interactive", 1)])[0] is old


def test_shares_follow_the_weights():
    order = WeightedFair()
    served = dict.fromkeys(CLASSES, 0)
    tasks = [Task(0.0, name, 10**6) for name in CLASSES]
    for _ in range(1300):
        task = order.order(0.0, tasks)[0]
        order.served(task, STEP_TOKENS)
        served[task.service_class] += STEP_TOKENS
    total = sum(served.values())
    weights = {name: c.weight / sum(c.weight for c in CLASSES.values()) for name, c in CLASSES.items()}
    assert {name: tokens / total for name, tokens in served.items()} == pytest.approx(weights, rel=0.02)


def test_an_idle_class_saves_no_credit():
    order = WeightedFair()
    chat, batch = Task(0.0, "interactive", 10**6), Task(0.0, "batch", 10**6)
    for _ in range(100):
        order.served(order.order(0.0, [chat])[0], STEP_TOKENS)
    won = 0
    for _ in range(9):
        task = order.order(0.0, [chat, batch])[0]
        order.served(task, STEP_TOKENS)
        won += task is batch
    assert won <= 2  # its ninth, not the hundred steps it was away


# --- no starvation


def finish_time(order: QueueOrder, victim: Task, arrivals: list[Task]) -> float:
    """One server hands out STEP_TOKENS tokens every STEP_S seconds by `order`; when is the victim done?"""
    coming = sorted([*arrivals, victim], key=lambda task: task.arrival)
    now, here = 0.0, []
    while victim.num_uncomputed:
        while coming and coming[0].arrival <= now:
            here.append(coming.pop(0))
        left = STEP_TOKENS
        for task in order.order(now, here):
            count = min(left, task.num_uncomputed)
            if count:
                order.served(task, count)
            task.num_uncomputed -= count
            left -= count
        here = [task for task in here if task.num_uncomputed]
        now += STEP_S
    return now


def bound(name: str, victim: Task, arrivals: list[Task]) -> float:
    """What the order's promise allows: seconds on the clock until the victim must be done."""
    rate = STEP_TOKENS / STEP_S
    tasks = [*arrivals, victim]

    def due(task: Task) -> float:
        return task.arrival + CLASSES[task.service_class].ttft_s

    def work(*chosen: Task) -> float:
        return sum(task.size for task in chosen) / rate

    start = victim.arrival + 2 * STEP_S  # a step runs when it arrives, and a last one is not full
    older = [task for task in tasks if task.arrival <= victim.arrival]
    if name == "fcfs":
        return start + work(*older)
    if name == "edf":
        return start + work(*(task for task in tasks if due(task) <= due(victim)))
    if name == "srpt":
        return start + OVERDUE_OBJECTIVES * CLASSES[victim.service_class].ttft_s + work(*older)
    share = CLASSES[victim.service_class].weight / sum(c.weight for c in CLASSES.values())
    mine = [task for task in older if task.service_class == victim.service_class]
    lead = len(CLASSES) * STEP_S / share  # tags of classes differ by a step's tokens at most
    return start + (work(*mine) + lead) / share


@pytest.mark.parametrize("name", queue_orders)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), service_class=st.sampled_from(list(CLASSES)))
def test_no_request_waits_longer_than_its_bound(name, seed, service_class):
    """A long prompt among a flood of short interactive ones: twice what the server can do, for much longer than the
    bound, and a rival flood of its own class before it."""
    rng = random.Random(seed)
    victim = Task(rng.uniform(0, 5), service_class, rng.randint(200, 2000))
    flood, clock, rate = [], 0.0, STEP_TOKENS / STEP_S
    while clock < 1500:
        size = rng.choice((16, 64, 256))
        flood.append(Task(clock, rng.choices(list(CLASSES), (8, 1, 1))[0], size))
        clock += rng.expovariate(2 * rate / size)
        if clock > 400 and service_class != "batch":
            break
    limit = bound(name, victim, flood)
    assert finish_time(queue_orders[name](), victim, flood) <= limit, f"seed {seed}"
