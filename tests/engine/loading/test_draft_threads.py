"""The threads with which the backend of a draft model is measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.config.config import Config
from engine.loading import load_model as loading


class Asked(Exception):
    """A backend is wanted."""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"num_threads": 3}, 3),
        ({"num_threads": 6, "tensor_parallel_size": 2}, 3),
        ({"num_threads": 9, "expert_parallel_size": 4, "expert_remote_ranks": 1}, 3),
    ],
)
def test_it_has_the_threads_of_its_rank(monkeypatch, flags, expected):
    """It is loaded before the model that is served."""
    seen = []

    def backend(*_):
        seen.append((torch.get_num_threads(), torch.is_grad_enabled()))
        raise Asked

    monkeypatch.setattr(loading, "_backend", backend)
    monkeypatch.setattr(loading, "load", lambda *_, **__: {})
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    torch.set_num_threads(1)
    draft = SimpleNamespace(config=None)
    try:
        with pytest.raises(Asked):
            loading.load_model(
                Config(dtype="float32", weight_cache="off", **flags), None, None, draft, lambda done, total: None, None
            )
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
    assert seen == [(expected, False)]
