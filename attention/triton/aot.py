"""Compiles kernels ahead of time, without the GPU.

`record` runs the ordinary launch code on tensors without memory (device "meta"), and records every launch instead of
running it. `build` compiles one launch for a compute capability exactly as the first launch on such a GPU would (the
same constants, the same promises of alignment). `resources` reads the cost from ptxas. So the tests check the shipped
kernels, and no second list of signatures can become stale.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}

OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded kernel launch."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of one compiled kernel per thread (registers, spills) and per program (shared memory), and the
    instructions that it uses."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int  # Hopper's tensor-core instructions
    mma: int  # Ampere's
    wide_loads: int  # 16 bytes per thread
    wide_stores: int
    in_flight: int  # asynchronous copies in flight while the main loop computes; 0 = not pipelined
    boxes: int = 0  # copies of whole boxes by Hopper's copy engine (TMA)
    threads: int = 128  # of a program
    waits: tuple[int, ...] = ()  # of each wait for wgmma: how many may still run
    serialized: bool = False  # the assembler makes every wgmma wait for the one before


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Records the launches inside the block in the list that it yields, and does not run them."""
    launches: list[Launch] = []

    def run(self: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(self, grid, arguments, options))

    original, JITFunction.run = JITFunction.run, run
    try:
        yield launches
    finally:
        JITFunction.run = original


def record(launch: Callable[[], object]) -> list[Launch]:
    """The launches of `launch`."""
    with recording() as launches:
        launch()
    return launches


def build(launch: Launch, capability: int) -> tuple[CompiledKernel, str]:
    """Compile for compute capability 80, 90, ... -> the kernel, and the report of ptxas, which is empty if Triton found
    the kernel in its cache. Needs no GPU. Raises triton.CompilationError and ptxas's errors."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        kind, aligned = ("constexpr", False) if param.is_constexpr else describe(value)
        if kind in ("i32", "i64") and value == 1 and not param.do_not_specialize:
            kind = "constexpr"  # Triton makes a constant of every 1
        signature[param.name] = kind
        if kind == "constexpr":
            constants[param.name] = value
        elif aligned and not param.do_not_specialize and not param.do_not_specialize_on_alignment:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    with triton.knobs.nvidia.scope(), redirect_stdout(StringIO()) as said:
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    return kernel, said.getvalue()


def describe(value: Any) -> tuple[str, bool]:
    """(type in a kernel's signature, whether its value or address is a multiple of 16)."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype], value.storage_offset() * value.itemsize % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if -(1 << 31) <= value < 1 << 31 else "i64"), value % 16 == 0


def resources(launch: Launch, capability: int) -> Resources:
    """The resources of `launch`, compiled by `build`."""
    kernel, said = build(launch, capability)
    ptx = kernel.asm["ptx"]
    log = said or assemble(ptx, capability)
    stores, loads = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)[0]
    return Resources(
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spill_bytes=int(stores) + int(loads),
        shared_bytes=kernel.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        wide_loads=len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg", ptx)),  # .cg copies 16 bytes, always
        in_flight=max(map(int, re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", ptx)), default=0),
        wide_stores=len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
        boxes=len(re.findall(r"cp\.async\.bulk\.tensor\S*global", ptx)),
        threads=32 * kernel.metadata.num_warps,  # with the warps that specialization adds
        serialized="wgmma.mma_async instructions are serialized" in log,
        waits=tuple(map(int, re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx))),
    )


def assemble(ptx: str, capability: int) -> str:
    """The report of ptxas; the numbers inside a compiled kernel can only be read with a driver."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = f"--gpu-name={sm_arch_from_capability(capability)}"
        command = [get_ptxas(capability).path, "-v", target, str(source), "-o", str(source.with_suffix(".cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
