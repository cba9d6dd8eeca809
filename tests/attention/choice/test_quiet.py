"""Measurements with all threads, or with one if others use the cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention.choice import quiet
from attention.choice.quiet import undisturbed, waited_s


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("waited", "expected"), [(0.0, [2] * 3), (3.0, [2, 1, 1, 1])], ids=["quiet", "busy"])
def test_a_measurement_that_has_to_wait_ends_and_is_done_with_one_thread(threads, monkeypatch, waited, expected):
    given, seen = [0.0], []
    monkeypatch.setattr(quiet, "waited_s", lambda: given[0])

    def measure(check) -> str:
        for _ in range(3):
            seen.append(torch.get_num_threads())
            given[0] += waited
            check()
        return f"by {seen[-1]}"

    assert undisturbed(measure) == (f"by {expected[-1]}", expected[-1])
    assert seen == expected and torch.get_num_threads() == 2


def test_the_number_of_threads_returns_after_an_error(threads, monkeypatch):
    given = iter([0.0, 9.0])
    monkeypatch.setattr(quiet, "waited_s", lambda: next(given))

    def measure(check) -> None:
        check()
        raise ValueError(f"with {torch.get_num_threads()}")

    with pytest.raises(ValueError, match="with 1"):
        undisturbed(measure)
    assert torch.get_num_threads() == 2


def test_the_waiting_of_all_threads_is_added(tmp_path: Path):
    for thread, told in (("1", "5 2000000000 7"), ("2", "5 500000000 7"), ("3", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(told)
    assert waited_s(tmp_path) == 2.5
    assert waited_s(tmp_path / "none") == 0
    assert waited_s() >= 0
