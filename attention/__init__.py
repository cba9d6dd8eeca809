"""How attention is computed: one ragged-batch interface, several backends.

Files:
    codes           KV with one byte per element: conversion between values and codes
    interface       The attention backend protocol and the ragged batch it works on
    quantize_torch  KV blocks in one byte per element on a CPU
    reference       The definition of attention: every other backend is tested against this one
    rotary          Rotary position embedding, half-split
    torch_backend   The backend for every device of torch: gathers blocks, then calls torch's fused attention
    cpu/            Attention on CPUs in C++, on the paged pool itself: no gather, no copy of the context
    triton/         Attention kernels in Triton for NVIDIA GPUs
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from attention.codes import DTYPES
from attention.cpu.choice import Heads, fastest_of
from attention.interface import AttentionBackend, RaggedBatch, reads_codes
from attention.reference import ReferenceBackend
from attention.torch_backend import TorchBackend
from net.compiled import NotCompiled
from net.user_file import is_file, load

if TYPE_CHECKING:
    from attention.cpu import CpuBackend

log = logging.getLogger(__name__)


def triton_backend() -> AttentionBackend:
    """The Triton kernels, imported at the first call. Raises ValueError if triton is not installed."""
    try:
        from attention.triton.backend import TritonBackend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("attention backend 'triton' needs pip install 'mooncake-serve[triton]'") from error
    return TritonBackend()


def cpu_backend(level: str = "auto") -> CpuBackend:
    """The C++ kernels of a level of attention.cpu.level, compiled at the first call. Raises ValueError if they are not
    available."""
    from attention.cpu import CpuBackend

    try:
        return CpuBackend(level)
    except NotCompiled as error:
        raise ValueError(
            f"attention backend 'cpu' is not available: {error}; choose --attention-backend torch"
        ) from error


backends: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": cpu_backend,
    "reference": ReferenceBackend,
    "torch": TorchBackend,
    "triton": triton_backend,
}

METHODS = ("plan", "write_kv", "rotate_and_write_kv", "attend")
"""The methods that a user's backend must have; see attention/interface.py."""

__all__ = ["AttentionBackend", "RaggedBatch", "backends", "choose"]


def choose(
    name: str,
    device: str,
    head_size: int = 64,
    kv_dtype: str = "",
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    cpu_level: str = "auto",
) -> AttentionBackend:
    """The backend called `name`, or the user's class from 'FILE.py:NAME'; 'auto' is the fastest one that runs on
    `device` ("cpu", "cuda"), takes heads of `head_size` elements and reads KV of `kv_dtype`: a name in
    attention.codes.DTYPES, anything else is a float type. On a CPU 'auto' measures, with the model's heads in its
    `dtype`, on one rank; its kernels are those of `cpu_level` (attention/cpu/level.py). Raises ValueError."""
    backend = named(name, device, Heads(num_heads, num_kv_heads, head_size, dtype), cpu_level)
    if kv_dtype in DTYPES and not reads_codes(backend):
        if name != "auto":
            raise ValueError(
                f"attention backend {backend.name!r} cannot read quantized KV: give --attention-backend auto with "
                f"--kv-cache-dtype {kv_dtype}, or another --kv-cache-dtype"
            )
        log.warning("The %s backend cannot read KV in %s. Using torch, which is slower.", backend.name, kv_dtype)
        return TorchBackend()
    return backend


def named(name: str, device: str, heads: Heads, cpu_level: str) -> AttentionBackend:
    """See choose."""
    if is_file(name):
        return own(name)
    if name == "auto":
        return fastest(device, heads, cpu_level)
    if name not in backends:
        raise ValueError(f"no attention backend {name!r} for {device}; choose auto, {', '.join(sorted(backends))}")
    if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("attention backend 'triton' needs a GPU (or TRITON_INTERPRET=1, for tests); choose torch")
    if name == "cpu" and device != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device}; choose torch")
    return cpu_backend(cpu_level) if name == "cpu" else backends[name]()


def own(name: str) -> AttentionBackend:
    """The user's backend from 'FILE.py:NAME'. Raises ValueError."""
    backend: AttentionBackend = load("--attention-backend", name, METHODS)()
    if not isinstance(getattr(backend, "name", None), str):
        raise ValueError(f"--attention-backend {name}: it lacks a `name`, a string")
    return backend


def fastest(device: str, heads: Heads, cpu_level: str) -> AttentionBackend:
    """On a GPU triton if it is available, else torch. On a CPU the faster of our kernels and torch in a short
    measurement; the log has the times, or the reason why there are no kernels. Raises ValueError for a level that this
    CPU lacks."""
    size = heads.head_size
    if device != "cpu":
        takes = size % 16 == 0 and size <= 256  # attention/triton/tiles.py
        return triton_backend() if takes and runs_triton() else TorchBackend()
    from attention.cpu.backend import check_head_size

    try:
        check_head_size(size)
        ours = cpu_backend(cpu_level)
    except ValueError as error:
        if cpu_level != "auto":
            raise
        log.warning("%s. Using torch, which is slower.", str(error).partition("; choose")[0])
        return TorchBackend()
    return fastest_of([(f"our kernels of level {ours.level}", ours), ("torch", TorchBackend())], heads)


def runs_triton() -> bool:
    """Whether the GPU and what is installed take the Triton kernels: compute capability 8.0 and later."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)
