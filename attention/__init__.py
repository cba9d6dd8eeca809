"""How attention is computed: one ragged-batch interface, several backends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from attention import custom
from attention.codes import DTYPES
from attention.cpu_build import Unavailable
from attention.interface import AttentionBackend, RaggedBatch, reads_codes
from attention.reference import ReferenceBackend
from attention.torch_backend import TorchBackend

log = logging.getLogger(__name__)


def triton_backend() -> AttentionBackend:
    """The Triton kernels, imported when they are asked for. Raises ValueError where triton is not installed."""
    try:
        from attention.triton_backend import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("attention backend 'triton' needs pip install 'mooncake-serve[triton]'") from error
    return TritonBackend()


def cpu_backend() -> AttentionBackend:
    """The C++ kernels, compiled when they are asked for. Raises ValueError where they cannot be had."""
    from attention.cpu import CpuBackend

    try:
        return CpuBackend()
    except Unavailable as error:
        raise ValueError(
            f"attention backend 'cpu' is not available: {error}; choose --attention-backend torch"
        ) from error


backends: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": cpu_backend,
    "reference": ReferenceBackend,
    "torch": TorchBackend,
    "triton": triton_backend,
}

__all__ = ["AttentionBackend", "RaggedBatch", "backends", "choose"]


def choose(name: str, device: str, head_size: int = 64, kv_dtype: str = "") -> AttentionBackend:
    """The backend called `name`, or the user's own from 'FILE.py:NAME'; 'auto' is the fastest that runs on `device`
    ("cpu", "cuda"), takes heads of `head_size` elements and reads KV of `kv_dtype`: a name in attention.codes.DTYPES,
    anything else is a float type. Raises ValueError."""
    backend = named(name, device, head_size)
    if kv_dtype in DTYPES and not reads_codes(backend):
        if name != "auto":
            raise ValueError(
                f"attention backend {backend.name!r} reads no quantized KV: give --attention-backend auto with "
                f"--kv-cache-dtype {kv_dtype}, or another --kv-cache-dtype"
            )
        log.warning("The %s backend reads no KV in %s. Going on with torch, which is slower.", backend.name, kv_dtype)
        return TorchBackend()
    return backend


def named(name: str, device: str, head_size: int) -> AttentionBackend:
    """See choose."""
    if custom.is_file(name):
        return custom.load(name)
    if name == "auto":
        return fastest(device, head_size)
    if name not in backends:
        raise ValueError(f"no attention backend {name!r} for {device}; choose auto, {', '.join(sorted(backends))}")
    if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("attention backend 'triton' needs a GPU (or TRITON_INTERPRET=1, for tests); choose torch")
    if name == "cpu" and device != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device}; choose torch")
    return backends[name]()


def fastest(device: str, head_size: int) -> AttentionBackend:
    """cpu or, on a GPU, triton where it can be had, else torch; the log says why there is no cpu."""
    if device != "cpu":
        takes = head_size % 16 == 0 and head_size <= 256  # attention/tiles.py
        return triton_backend() if takes and runs_triton() else TorchBackend()
    from attention.cpu.backend import check_head_size

    try:
        check_head_size(head_size)
        return cpu_backend()
    except ValueError as error:
        log.warning("%s. Going on with torch, which is slower.", str(error).partition("; choose")[0])
        return TorchBackend()


def runs_triton() -> bool:
    """Whether the GPU and what is installed take the Triton kernels: compute capability 8.0 and later."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)
