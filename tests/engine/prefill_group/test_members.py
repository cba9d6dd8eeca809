"""Which nodes can take a part of a long prompt, and which say that they compute all layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.prefill_group.members import why_whole


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        ({}, None),
        ({"alone": False}, "--tensor-parallel-size"),
        ({"groups": "windows"}, "--kv-groups windows"),
        ({"experts": "ranks"}, "--expert-parallel-size"),
    ],
)
def test_why_a_node_computes_all_layers(model: dict[str, Any], flag: str | None):
    whole = SimpleNamespace(**{"alone": True, "groups": None, "experts": None} | model)
    reason = why_whole(whole)  # type: ignore[arg-type]
    assert reason is None if flag is None else flag in (reason or "")
