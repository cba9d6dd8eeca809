"""How attention is computed: one ragged-batch interface, several backends."""

from __future__ import annotations

from collections.abc import Callable

from attention.interface import AttentionBackend, RaggedBatch
from attention.reference import ReferenceBackend
from attention.torch_backend import TorchBackend

backends: dict[str, Callable[[], AttentionBackend]] = {"reference": ReferenceBackend, "torch": TorchBackend}

__all__ = ["AttentionBackend", "RaggedBatch", "backends", "choose"]


def choose(name: str, device: str) -> AttentionBackend:
    """The backend called `name`; 'auto' is the fastest that runs on `device` ("cpu", "cuda"). Raises ValueError."""
    if name == "auto":
        name = "torch"  # the only fast one so far, on every device
    if name not in backends:
        raise ValueError(f"no attention backend {name!r} for {device}; choose auto, {', '.join(sorted(backends))}")
    return backends[name]()
