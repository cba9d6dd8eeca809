"""Makes the backend of a node: a built-in one, the user's, or the fastest here."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch

from attention import backends
from attention.choice.measured import Heads, fastest_of
from attention.codes import DTYPES
from attention.cpu.backend import CpuBackend, check_head_size
from attention.cpu.level import lower
from attention.cpu.library import is_compiled
from attention.declared import reads_codes, takes_sinks
from attention.interface import AttentionBackend
from attention.torch_backend import TorchBackend
from net.compiled import NotCompiled
from net.user_file import is_file, load

log = logging.getLogger(__name__)

METHODS = ("plan", "write_kv", "rotate_and_write_kv", "attend")
"""The methods that a user's backend must have; see attention/interface.py."""


def choose(
    name: str,
    device: str,
    head_size: int = 64,
    kv_dtype: str = "",
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    cpu_level: str = "auto",
    sinks: bool = False,
) -> AttentionBackend:
    """The backend called `name`, or the user's class from 'FILE.py:NAME'; 'auto' is the fastest one that runs on
    `device` ("cpu", "cuda"), takes heads of `head_size` elements and reads KV of `kv_dtype`: a name in
    attention.codes.DTYPES, anything else is a float type. `rank`: of a latent (attention/latent.py), which `head_size`
    contains; 0: K and V of heads. `sinks`: whether the model's heads have sinks. On a CPU 'auto'
    measures, with the model's heads in its `dtype`, on one rank; its kernels are those of `cpu_level`
    (attention/cpu/level.py). Raises ValueError."""
    heads = Heads(num_heads, num_kv_heads, head_size, dtype, rank, sinks, kv_dtype)
    backend = named(name, device, heads, cpu_level)
    if sinks and not takes_sinks(backend):
        raise ValueError(
            f"attention backend {backend.name!r} has no attention sinks, which this model needs: give "
            "--attention-backend auto"
        )
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
        known = ", ".join(sorted(backends))
        raise ValueError(f"no attention backend {name!r} for {device}; choose --attention-backend auto, {known}")
    if name == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "attention backend 'triton' needs a GPU (or TRITON_INTERPRET=1, for tests); choose "
            "--attention-backend torch"
        )
    if name == "triton" and not triton_takes(heads):
        raise ValueError(
            f"attention backend 'triton' has no kernel for heads of {heads.head_size} elements"
            f"{f', of which {heads.rank} are values' if heads.rank else ''}; choose --attention-backend torch"
        )
    if name == "cpu" and device != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device}; choose --attention-backend torch")
    if name == "cpu":
        check_head_size(heads.head_size)
    return made(name, cpu_level)


def made(name: str, cpu_level: str = "auto") -> AttentionBackend:
    """A new backend of the registry. Its module is imported at the first call, and the C++ kernels of a level of
    attention/cpu/level.py are compiled then. Raises ValueError if triton is not installed or there are no kernels."""
    module, _, maker = backends[name].partition(":")
    arguments = (cpu_level,) if name == "cpu" else ()
    try:
        backend: AttentionBackend = getattr(import_module(module), maker)(*arguments)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("attention backend 'triton' needs pip install 'mooncake-serve[triton]'") from error
    except NotCompiled as error:
        raise ValueError(
            f"attention backend 'cpu' is not available: {error}; choose --attention-backend torch"
        ) from error
    return backend


def own(name: str) -> AttentionBackend:
    """The user's backend from 'FILE.py:NAME'. Raises ValueError."""
    backend: AttentionBackend = load("--attention-backend", name, METHODS)()
    if not isinstance(getattr(backend, "name", None), str):
        raise ValueError(f"--attention-backend {name}: it lacks a `name`, a string")
    return backend


def fastest(device: str, heads: Heads, cpu_level: str) -> AttentionBackend:
    """On a GPU triton if it is available, else torch. On a CPU the fastest of our kernels and torch in a short
    measurement (attention/choice/measured.py); the log has the times, or the reason why there are no kernels. Raises
    ValueError for a level that this CPU lacks."""
    if device != "cpu":
        return made("triton") if triton_takes(heads) and runs_triton() else TorchBackend()
    try:
        check_head_size(heads.head_size)
        ours = cast(CpuBackend, made("cpu", cpu_level))
    except ValueError as error:
        if cpu_level != "auto":
            raise
        log.warning("%s. Using torch, which is slower.", str(error).partition("; choose")[0])
        return TorchBackend()
    kernels = [ours]
    if cpu_level == "auto":
        for level in lower(ours.level, heads.dtype == torch.bfloat16, is_compiled):
            try:
                kernels.append(CpuBackend(level))
            except NotCompiled as error:  # it was compiled, and cannot be opened
                log.warning("the kernels of level %s are left out: %s", level, error)
    named = [(f"our kernels of level {each.level}", each) for each in kernels]
    return fastest_of([*named, ("torch", TorchBackend())], heads)


def triton_takes(heads: Heads) -> bool:
    """Whether the Triton kernels have tiles for heads of this size."""
    size, rank = heads.head_size, heads.rank
    if rank:
        return rank % 16 == 0 and rank <= 512 and (size - rank) % 16 == 0  # attention/triton/latent_tiles.py
    return size % 16 == 0 and size <= 256  # attention/triton/tiles.py


def runs_triton() -> bool:
    """Whether Triton is installed and the GPU has compute capability 8.0 or later, which the Triton kernels need."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability() >= (8, 0)
