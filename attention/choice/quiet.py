"""Measurements at a start on a machine that may be busy.

Products and attention of several threads end at a barrier. If another process holds the core of one of the threads, all
wait for a time slice, which is a hundred times as long as a product. Then every candidate takes equally long, and the
choice would be a matter of luck. One thread is only delayed now and then, and the best of some rounds is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

WAITED = 0.05
"""The share of a measurement that the threads may wait for a core, all together."""


class Disturbed(Exception):
    """The threads of this process had to wait for cores that others used."""


def undisturbed(measure: Callable[[Callable[[], None]], T]) -> tuple[T, int]:
    """What `measure` returns with torch's number of threads, and this number; or with one thread, if it was Disturbed.
    It calls its argument after every round, which raises this and so ends a measurement in vain."""
    threads, began, before = torch.get_num_threads(), time.perf_counter(), waited_s()

    def check() -> None:
        if waited_s() - before > WAITED * (time.perf_counter() - began):
            raise Disturbed

    if threads > 1:
        try:
            return measure(check), threads
        except Disturbed:
            torch.set_num_threads(1)
    try:
        return measure(lambda: None), 1
    finally:
        torch.set_num_threads(threads)


def waited_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that the threads of this process were ready to run and had no core; 0 if the kernel does not say it."""
    waited = 0
    for path in tasks.glob("*/schedstat"):
        try:
            waited += int(path.read_text().split()[1])
        except (OSError, IndexError):  # the thread has ended, or the kernel keeps no figures
            continue
    return waited / 1e9
