"""The C++ kernels of aarch64 on any machine: cross-compiled, and run by qemu's user emulation, a process per call."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from torch import Tensor

from attention.cpu import build as cpu_build
from attention.cpu import library as kernels
from attention.cpu.backend import CpuBackend
from attention.cpu.library import Attend, Write

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]


def build(folder: Path) -> Path:
    """The program of emulated.cpp with all kernels, for aarch64."""
    program, here = folder / "emulated", Path(__file__).with_suffix(".cpp")
    flags = [flag for flag in cpu_build.FLAGS if flag != "-fPIC"]
    sources = [*kernels.SOURCES, here]
    command = [COMPILER, *flags, *kernels.FLAGS, "-Werror", "-static", f"-I{kernels.FOLDER}"]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True)
    return program


class Emulated(CpuBackend):
    """The backend `cpu` of level neon, on the program that `build` made."""

    def __init__(self, program: Path) -> None:
        self.level = "neon"
        self.program = program
        self.library: Any = self  # its kernels are methods here
        self.near: list[tuple[int, int]] = []  # (address, bytes) of what the next call's addresses may lie in

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, batch: Any, plan: Any) -> None:
        self._lies_in(k, v, kv, plan.slots)
        super().write_kv(k, v, kv, batch, plan)

    def rotate_and_write_kv(
        self, qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor, kv: Tensor, batch: Any, plan: Any
    ) -> Tensor:
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype
        plan.angles[id(cos)] = cos, cos, sin  # so that the kernel reads these very tensors
        self._lies_in(qkv, kv, cos, sin, plan.slots)
        return super().rotate_and_write_kv(qkv, num_heads, cos, sin, kv, batch, plan)

    def attend(self, q: Tensor, kv: Tensor, batch: Any, plan: Any, scale: float, **options: Any) -> Tensor:
        given = [x for x in (options.get("sinks"),) if x is not None]
        self._lies_in(q, kv, plan.cu_q, plan.ctx_lens, plan.block_tables, *given)
        self.out_bytes = q.numel() * q.element_size()
        return super().attend(q, kv, batch, plan, scale, **options)

    def mooncake_write(self, address: int) -> None:
        self._run(b"w", Write.from_address(address), ("q", "k", "v", "cos", "sin", "slots"))

    def mooncake_decode(self, address: int) -> None:
        self._attend(b"d", address)

    def mooncake_prefill(self, address: int) -> None:
        self._attend(b"p", address)

    def _attend(self, kernel: bytes, address: int) -> None:
        call = Attend.from_address(address)
        self.near = sorted({*self.near, (call.out, self.out_bytes)})  # a step may make two calls
        self._run(kernel, call, ("q", "out", "sinks", "block_tables", "cu_q", "ctx_lens"))

    def _lies_in(self, *tensors: Tensor) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.near = sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})

    def _run(self, kernel: bytes, call: Any, names: tuple[str, ...]) -> None:
        memory, places = b"", []
        for address, size in self.near:
            places.append((address, size, len(memory)))
            memory += ctypes.string_at(address, size) + bytes(-size % 64)

        def moved(at: int | None) -> int | None:
            if at is None:
                return None
            return next(1 + to + at - address for address, size, to in places if address <= at < address + size)

        sent = type(call).from_buffer_copy(call)
        for name in names:
            setattr(sent, name, moved(getattr(call, name)))
        sent.kv.data = moved(call.kv.data)
        given = kernel + struct.pack("<q", len(memory)) + bytes(sent) + memory
        done = subprocess.run([EMULATOR, str(self.program)], input=given, capture_output=True, check=True).stdout
        for address, size, to in places:
            ctypes.memmove(address, done[to : to + size], size)
