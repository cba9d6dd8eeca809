"""Stepping back, in threads of their own: a thread cannot step forward again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.core.priority import NICEST, step_back


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("by", [0, 3, NICEST + 5])
def test_a_thread_and_those_it_starts_step_back_and_nobody_else(by: int) -> None:
    before = nice()

    def work() -> tuple[int, int]:
        step_back(by)
        return nice(), in_thread(nice)

    expected = min(NICEST, before + by)
    assert in_thread(work) == (expected, expected)
    assert nice() == before


def test_steps_add_up() -> None:
    def work() -> int:
        step_back(2)
        step_back(3)
        return nice()

    assert in_thread(work) == min(NICEST, nice() + 5)
