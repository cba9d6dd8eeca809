"""How attention is computed: one ragged-batch interface, several backends."""

from __future__ import annotations

import os
from collections.abc import Callable

from attention import custom
from attention.interface import AttentionBackend, RaggedBatch
from attention.reference import ReferenceBackend
from attention.torch_backend import TorchBackend


def triton_backend() -> AttentionBackend:
    """The Triton kernels, imported when they are asked for. Raises ValueError where triton is not installed."""
    try:
        from attention.triton_backend import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("attention backend 'triton' needs pip install 'mooncake-serve[triton]'") from error
    return TritonBackend()


backends: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceBackend,
    "torch": TorchBackend,
    "triton": triton_backend,
}

__all__ = ["AttentionBackend", "RaggedBatch", "backends", "choose"]


def choose(name: str, device: str) -> AttentionBackend:
    """The backend called `name`, or the user's own from 'FILE.py:NAME'; 'auto' is the fastest that runs on `device`
    ("cpu", "cuda"). Raises ValueError."""
    if custom.is_file(name):
        return custom.load(name)
    if name == "auto":
        name = "torch"  # the only fast one so far, on every device
    if name not in backends:
        raise ValueError(f"no attention backend {name!r} for {device}; choose auto, {', '.join(sorted(backends))}")
    if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("attention backend 'triton' needs a GPU (or TRITON_INTERPRET=1, for tests); choose torch")
    return backends[name]()
