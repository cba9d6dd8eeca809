"""Requests whose experts were lost: they end with the reason, or go on and keep their KV for themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.lost_experts import settle_losses
from engine.model.experts.losses import Loss


class Journal:
    def __init__(self) -> None:
        self.notes: list[tuple[float, str, dict[str, Any]]] = []

    def note(self, now: float, name: str, facts: dict[str, Any]) -> None:
        self.notes.append((now, name, facts))


class Batcher:
    """What settle_losses asks of it."""

    def __init__(self) -> None:
        self.aborted: list[tuple[float, str]] = []
        self.private: list[str] = []

    def abort(self, now: float, request_id: str) -> None:
        self.aborted.append((now, request_id))

    def keep_private(self, request: Any) -> None:
        self.private.append(request.request_id)


@pytest.fixture
def step() -> Any:
    requests = [SimpleNamespace(request_id=f"r{i}", finished=i == 2, journal=Journal()) for i in range(4)]
    return SimpleNamespace(rows=[SimpleNamespace(request=request) for request in requests])


def test_those_that_may_not_go_on_end_with_the_rank_and_the_others_are_untouched(step):
    batcher = Batcher()
    losses = {1: Loss(3, (2, 5), fails=True), 2: Loss(1, (2, 5), fails=True)}
    (emission,) = settle_losses(7.0, batcher, step, losses)  # row 2 has finished meanwhile
    assert emission.request is step.rows[1].request and emission.token_id is None
    assert emission.error is not None and "lost with rank 2, 5 of --expert-parallel-size" in emission.error
    assert batcher.aborted == [(7.0, "r1")] and not batcher.private
    assert not any(row.request.journal.notes for row in step.rows)


def test_those_that_go_on_keep_their_kv_and_say_what_is_missing(step):
    batcher = Batcher()
    losses = {0: Loss(3, (1,), fails=False), 3: Loss(8, (1,), fails=False)}
    assert settle_losses(7.0, batcher, step, losses) == []
    assert batcher.private == ["r0", "r3"] and not batcher.aborted
    assert step.rows[0].request.journal.notes == [(7.0, "experts_dropped", {"pairs": 3, "ranks": [1]})]
    assert step.rows[3].request.journal.notes == [(7.0, "experts_dropped", {"pairs": 8, "ranks": [1]})]


def test_a_step_without_losses_changes_nothing(step):
    batcher = Batcher()
    assert settle_losses(7.0, batcher, step, {}) == []
    assert not batcher.private and not batcher.aborted
