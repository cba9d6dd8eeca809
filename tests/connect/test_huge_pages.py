"""Huge pages under memory that a program uses."""

import ctypes
import mmap
import random
import re
import time
from pathlib import Path

import pytest

from connect.common import huge_pages
from connect.common.huge_pages import HugePages
from net.transfer.common.memory import HUGE_BYTES

MIB = 1 << 20


def huge_bytes(address: int) -> int:
    """Of the mapping that holds the address."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(text, 16) for text in part.split()[0].split("-"))
        if start <= address < end:
            return 1024 * int(re.search(r"AnonHugePages: +(\d+)", part)[1])
    return 0


@pytest.fixture
def memory():
    made = mmap.mmap(-1, 12 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made[:] = random.Random(2).randbytes(12 * MIB)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))


def ended(pages):
    deadline = time.monotonic() + 60
    while pages._thread is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    return pages._thread is None


def test_memory_moves_and_its_content_stays(memory):
    made, address = memory
    before, pages = bytes(made), HugePages()
    pages.ask(address + 5, 12 * MIB - 5)
    assert ended(pages) and bytes(made) == before
    moved = huge_bytes(address + 6 * MIB)
    assert moved % HUGE_BYTES == 0 and moved <= 12 * MIB
    if not moved:
        pytest.skip("this kernel moves nothing")
    pages.ask(address, MIB)  # less than a huge page
    assert pages._thread is None


def test_nothing_is_touched_once_it_is_forgotten(memory, monkeypatch):
    _, address = memory
    steps = []
    pages = HugePages()

    def slow(start, nbytes, advice):
        if advice == huge_pages.MADV_COLLAPSE:
            steps.append(start)
            time.sleep(0.02)
        return 0

    monkeypatch.setattr(huge_pages, "STEP_BYTES", HUGE_BYTES)
    monkeypatch.setattr(huge_pages, "_madvise", slow)
    pages.ask(address, 12 * MIB)
    pages.ask(address + 12 * MIB, 100 * MIB)
    while not steps:
        time.sleep(0.001)
    pages.forget(address)
    pages.forget(address + 12 * MIB)
    before = list(steps)
    assert ended(pages) and steps == before and len(steps) < 56
    pages.ask(address, 12 * MIB)
    pages.close()
    assert ended(pages) and len(steps) <= len(before) + 1
