"""All layers of a step in one C call.

Layer by layer, a step enters the interpreter about three hundred times, and each time the event loop may hold the
interpreter lock: with 32 streams, this took a quarter of a decode step's time. If all layers have the same form and
consist only of C++ kernels, their calls are therefore listed first (attention/cpu/layers.py and `tail` of
engine/model/cpu/ops.h) and run in one call. Another thread can end it with a Stop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attention.cpu.backend import CpuBackend, Plan
from attention.cpu.layers import Work, address_of, addresses, attention_calls
from attention.interface import AttentionBackend
from engine.model.model_config import ModelConfig
from engine.model.ops.cpu import CpuOps, CpuTail, TailCall
from engine.model.ops.interface import Ops, Tail

TAIL_CALL = np.dtype(TailCall)
Angles = tuple[Tensor, Tensor]


class Stopped(Exception):
    """A step has ended between two of its layers, without a result."""


class Stop:
    """Ends a step: a `before_layer` of Model.forward that raises Stopped once another thread has set it. One call of
    all layers ends behind the attention or the products that it is in."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._flag)

    def set(self, value: bool) -> None:
        self._flag.value = value

    def __call__(self, layer: int) -> None:
        if self._flag.value:
            raise Stopped


class CpuLayers:
    """The layers of one model up to attention in the last one: the rest is needed only for a few rows."""

    def __init__(self, config: ModelConfig, backend: CpuBackend, ops: CpuOps, tails: Sequence[CpuTail]) -> None:
        self._backend, self._kernels = backend, ops.kernels
        self._tails = tails  # own the memory at these addresses
        self._addresses = np.array([tail.address for tail in tails[:-1]], np.uint64)
        self._windows = [config.window(layer) for layer in range(config.num_layers)]
        self._heads, self._head_size = config.num_heads, config.head_size
        self._scale, self._soft_cap = config.attention_scale, config.attention_soft_cap

    def run(
        self,
        qkv: Tensor,
        x: Tensor,
        kv_pool: Tensor,
        plan: Plan,
        angles: Angles,
        local_angles: Angles,
        stop: Stop | None = None,
    ) -> Tensor:
        """The last layer's attention [T, num_heads * head_size]. Overwrites qkv [T, (num_heads + 2 num_kv_heads) *
        head_size] of the first layer, and x [T, H], which becomes the last tail's input. Raises Stopped if `stop` was
        set before the last call began."""
        rows, threads = len(x), torch.get_num_threads()
        heads = qkv.view(rows, -1, self._head_size)
        out = torch.empty(rows, self._heads, self._head_size, dtype=qkv.dtype)
        work = Work(heads, self._heads, kv_pool, out, self._scale, self._soft_cap)
        attention = attention_calls(self._backend, work, plan, self._windows, angles, local_angles)
        normed = torch.empty_like(x)
        tails = np.zeros(len(self._windows) - 1, TAIL_CALL)
        tails["layer"] = self._addresses
        buffers = {"attended": out, "x": x, "normed": normed, "y": qkv}
        for name, tensor in buffers.items():
            tails[name] = tensor.data_ptr()
        tails["m"], tails["threads"] = rows, threads
        each = np.zeros((len(self._windows), attention.calls.shape[1] + 1, 2), np.uint64)
        each[:, :-1] = attention.calls
        each[:-1, -1, 0], each[:-1, -1, 1] = address_of(self._kernels.tail_call), addresses(tails)
        calls = each.reshape(-1, 2)[:-1]
        if not self._kernels.run_calls(calls.ctypes.data, len(calls), None if stop is None else stop.address):
            raise Stopped
        return out.flatten(1)


def all_in_one(config: ModelConfig, backend: AttentionBackend, ops: Ops, tails: Sequence[Tail]) -> CpuLayers | None:
    """None if a layer needs the interpreter: another backend, experts, norms of q and k, a latent, sinks, several
    ranks."""
    ours = [tail for tail in tails if isinstance(tail, CpuTail)]
    plain = not (config.qk_norm or config.joint_qk_norm) and config.latent is None and not config.sinks
    if type(backend) is not CpuBackend or not isinstance(ops, CpuOps) or len(ours) < len(tails) or not plain:
        return None
    return CpuLayers(config, backend, ops, ours)
