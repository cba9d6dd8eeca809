"""How attention is computed: one ragged-batch interface, several backends."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

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


def runs_triton() -> bool:
    """Whether the GPU and what is installed take the Triton kernels: compute capability 8.0 and later."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)


def choose(name: str, device: str) -> AttentionBackend:
    """The backend called `name`; 'auto' is the fastest that runs on `device` ("cpu", "cuda"). Raises ValueError."""
    if name == "auto":
        name = "triton" if device.startswith("cuda") and runs_triton() else "torch"
    if name not in backends:
        raise ValueError(f"no attention backend {name!r} for {device}; choose auto, {', '.join(sorted(backends))}")
    if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("attention backend 'triton' needs a GPU (or TRITON_INTERPRET=1, for tests); choose torch")
    return backends[name]()
