"""The operations of a model on a CPU: kernels of engine/model/cpu, called through ctypes.

    ops_amx.cpp   bfloat16 on AMX tiles
    ops_any.cpp   every other type and level: vdpbf16ps for bfloat16 if the CPU has it, else products in float32;
                  weights in groups of inputs (Quantized) at every level
    ops_bytes.cpp weights of one byte with float32 scales (Scaled) at every level; compiled only for a model with them

Each has the operations of cpu/ops.h on products of its own. A weight is packed once, in the order in which these read
it (cpu/gemm_amx.h, cpu/gemm_any.h, cpu/groups.h, cpu/bytes.h), without changing its type. Only the packed copy is kept:
it serves any number of rows, and the vocabulary's copy also serves the embedding. Sums are float32 and each result is
rounded once, so a fused operation is closer to the exact value than the chain of TorchOps that it replaces. Integer
weights are multiplied with rows that are rounded to one byte per element, in the groups of the weight.

Tensors of another type than the model's use the operations of TorchOps, the base class.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cpu import build as cpu_build
from attention.cpu.level import LEVELS, best
from engine.model.ops.huge_pages import HugePages
from engine.model.ops.interface import Linear, Tail, TorchOps, Vocabulary
from engine.model.ops.quantized import GROUP, Mixed, Products, Quantized, Scaled, Weight
from net import compiled

FOLDER = Path(__file__).parents[1] / "cpu"
VECTORS = Path(cpu_build.__file__).parent / "vectors"  # of vec.h
FLAGS = ("-ffp-contract=fast", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi")
"""The warnings are false alarms from g++'s own intrinsics."""

ELEMENTS = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
"""Types of models that the kernels accept -> their names in C++."""

KINDS = {"q8_0": 1, "q4_0": 2, "q4_1": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6, "int8": 8, "fp8": 9, "mxfp4": 10}
"""`Kind` of engine/model/cpu/weight.h; 0 = elements."""
MIXED = 7

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""`Activation` of engine/model/cpu/vectors.h."""


class PackedWeight(ctypes.Structure):
    """`Weight` of engine/model/cpu/weight.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    ]


class PackedTail(ctypes.Structure):
    """`Tail` of engine/model/cpu/ops.h."""

    _fields_ = [
        ("o", PackedWeight),
        ("gate_up", PackedWeight),
        ("down", PackedWeight),
        ("norm", ctypes.c_void_p),
        ("next_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("next", PackedWeight),
    ]


class TailCall(ctypes.Structure):
    """`TailCall` of engine/model/cpu/ops.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layer", "attended", "x", "normed", "y")),
        ("m", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    ]


P, I32, I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
SIGNATURES: dict[str, list[type]] = {
    "pack": [P, I64, I64, I32, P, I32],
    "rows_of": [P, P, I64, P, I32],
    "linear": [P, P, I64, I64, P, I32, I32],
    "gated_linear": [P, P, I64, I64, P, I64, I32, I32],
    "rms_norm": [P, I64, P, P, ctypes.c_float, I64, I64, P, I32],
    "act_mul": [P, I64, I64, P, I32, I32],
    "tail": [P, P, P, P, P, I64, I32],
    "tail_call": [P],
    "run_calls": [P, I64, P],
}


PACKING: dict[Products, dict[str, list[type]]] = {
    "elements": {},
    "groups": {"packed_bytes": [I64, I64], "pack_groups": [P, I64, I64, I64, I32, P, I32]},
    "bytes": {"packed_bytes": [I64, I64], "pack_bytes": [P, P, I64, I64, I64, I32, P, I32]},
}
"""Functions that pack weights which are not plain."""


@functools.cache
def library(level: str, dtype: torch.dtype, products: Products = "elements") -> ctypes.CDLL:
    """The kernels of a level (attention/cpu/level.py) for a type in ELEMENTS. Tiles multiply only elements. Raises
    NotCompiled: missing CPU features, no compiler, or Linux refuses the tile registers."""
    tiles = _tiles(level, dtype, products)
    kernels = cpu_build.load(*recipe(level, dtype, products))
    if tiles and kernels.amx_request() != 0:
        raise compiled.NotCompiled("Linux refuses this process the AMX tiles")
    for function, types in (SIGNATURES | PACKING[products]).items():
        getattr(kernels, function).argtypes = types
    return kernels


def is_compiled(level: str, dtype: torch.dtype, products: Products = "elements") -> bool:
    """Whether `library` finds these kernels in the cache."""
    return cpu_build.is_compiled(*recipe(level, dtype, products))


def _tiles(level: str, dtype: torch.dtype, products: Products) -> bool:
    return level == "amx" and dtype == torch.bfloat16 and products == "elements"


def recipe(level: str, dtype: torch.dtype, products: Products) -> cpu_build.Recipe:
    """The arguments of attention.cpu.build.load for the kernels of a level."""
    tiles = _tiles(level, dtype, products)
    source, element = "amx" if tiles else "bytes" if products == "bytes" else "any", ELEMENTS[dtype]
    features = LEVELS["avx512_bf16" if level == "amx" and not tiles else level]
    flags = (*FLAGS, f"-DELEMENT={element}")
    return f"ops-{source}-{level}-{element}", [FOLDER / f"ops_{source}.cpp"], features, flags, [VECTORS]


class Packed:
    """A weight [n, k] in the kernels' order; `gated` interleaves its halves. Owns the memory of `struct`."""

    def __init__(self, ops: CpuOps, weight: Weight, bias: Tensor | None = None, gated: bool = False) -> None:
        self.kernels, (self.outputs, self.k), self.dtype = ops.kernels, weight.shape, weight.dtype
        self.half = self.outputs // 2
        block = ops.block
        n = -(-self.half // (block // 2)) * block if gated else self.outputs
        self.parts: ctypes.Array[PackedWeight] | None = None  # of a Mixed weight, with one more behind the last
        self.order = None if isinstance(weight, Tensor) else weight.order
        if isinstance(weight, Tensor):
            self.step, weight = ops.step, weight.contiguous()
            self.memory = ops.memory.take(
                -(-n // block), -(-self.k // self.step) * self.step, block, dtype=weight.dtype
            )
            ops.kernels.pack(weight.data_ptr(), *weight.shape, gated, self.memory.data_ptr(), torch.get_num_threads())
            packed, kind = self.memory.data_ptr(), 0
        elif isinstance(weight, Scaled):
            self.step = GROUP
            packed, kind = self._pack_bytes(ops, weight, n, gated)
        else:
            self.step = GROUP
            packed, kind = self._pack_groups(ops, weight, n, gated)
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(bias) % block))
        address = None if self.bias is None else self.bias.data_ptr()
        self.struct = PackedWeight(packed, address, n, self.k, kind)
        self.address = ctypes.addressof(self.struct)
        self.structs = [self.struct] if self.parts is None else self.parts[:-1]
        self.offsets = [each.packed - self.memory.data_ptr() for each in self.structs]  # in the memory
        self.nbytes = self.memory.nbytes

    @property
    def bytes(self) -> Tensor:
        """[nbytes] uint8: the packed weight in its memory."""
        return self.memory.flatten().view(torch.uint8)

    def move(self, memory: Tensor | None) -> None:
        """From now on the weight is in `memory` [nbytes] uint8, at a multiple of 64, which has its `bytes`. None: it is
        nowhere, and must not be used until it is moved again. A tail that has it must be told (CpuTail.renew)."""
        for struct, offset in zip(self.structs, self.offsets, strict=True):
            struct.packed = None if memory is None else memory.data_ptr() + offset
        self.memory = torch.empty(0, dtype=torch.uint8) if memory is None else memory

    def _pack_groups(self, ops: CpuOps, weight: Quantized | Mixed, n: int, gated: bool) -> tuple[int, int]:
        """`packed` and `kind` of the struct; all parts are in self.memory."""
        parts = weight.parts if isinstance(weight, Mixed) else (weight,)
        rows = [part.shape[0] for part in parts] if len(parts) > 1 else [n]
        if any(count % ops.block for count in rows[:-1]) or (gated and len(parts) > 1):
            raise ValueError(f"parts of {rows} outputs in several types: only whole blocks of {ops.block}, not gated")
        sizes = [
            -(-count // ops.block) * ops.block * ops.kernels.packed_bytes(KINDS[part.kind], self.k)
            for count, part in zip(rows, parts, strict=True)
        ]
        self.memory = ops.memory.take(sum(sizes), dtype=torch.uint8)
        at, structs = self.memory.data_ptr(), []
        for part, size, count in zip(parts, sizes, rows, strict=True):
            kind, stored = KINDS[part.kind], part.blocks.contiguous()
            ops.kernels.pack_groups(stored.data_ptr(), *part.shape, kind, gated, at, torch.get_num_threads())
            structs.append(PackedWeight(at, None, count, self.k, kind))
            at += size
        if len(parts) == 1:
            return self.memory.data_ptr(), structs[0].kind
        self.parts = (PackedWeight * (len(structs) + 1))(*structs)
        return ctypes.addressof(self.parts), MIXED

    def _pack_bytes(self, ops: CpuOps, weight: Scaled, n: int, gated: bool) -> tuple[int, int]:
        """As _pack_groups, for one matrix."""
        kind, codes, scales = KINDS[weight.kind], weight.codes.contiguous(), weight.scales.contiguous()
        size = -(-n // ops.block) * ops.block * ops.kernels.packed_bytes(kind, self.k)
        self.memory = ops.memory.take(size, dtype=torch.uint8)
        at, threads = self.memory.data_ptr(), torch.get_num_threads()
        ops.kernels.pack_bytes(codes.data_ptr(), scales.data_ptr(), *weight.shape, kind, gated, at, threads)
        return at, kind

    def readable(self, x: Tensor) -> Tensor:
        """x [T, k] in the form that the kernels read: rows of whole steps with adjacent elements, in the weight's
        order."""
        if self.order is not None:
            return x.index_select(1, self.order)
        if self.k % self.step:
            return F.pad(x, (0, -self.k % self.step))
        return x if x.stride(1) == 1 else x.contiguous()


class CpuLinear(Packed):
    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self.dtype)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.readable(x)
        rows = len(x)
        y = torch.empty(rows, self.outputs, dtype=dtype)
        self.kernels.linear(
            self.address, x.data_ptr(), x.stride(0), rows, y.data_ptr(), dtype == torch.float32, torch.get_num_threads()
        )
        return y


class CpuVocabulary(CpuLinear):
    def embed(self, token_ids: Tensor) -> Tensor:
        rows = torch.empty(len(token_ids), self.k, dtype=self.dtype)
        ids = token_ids.contiguous()
        if self.kernels.rows_of(self.address, ids.data_ptr(), len(ids), rows.data_ptr(), torch.get_num_threads()):
            raise IndexError(f"token ids must be in 0 .. {self.outputs - 1}")
        return rows

    def logits(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)


class CpuGatedLinear(Packed):
    def __init__(self, ops: CpuOps, weight: Weight, activation: str) -> None:
        super().__init__(ops, weight, gated=True)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.readable(x)
        rows = len(x)
        y = torch.empty(rows, self.half, dtype=x.dtype)
        self.kernels.gated_linear(
            self.address,
            x.data_ptr(),
            x.stride(0),
            rows,
            y.data_ptr(),
            self.half,
            self.activation,
            torch.get_num_threads(),
        )
        return y


class CpuTail:
    """The part of a layer after attention, in one call."""

    def __init__(
        self,
        o: CpuLinear,
        norm: Tensor,
        gate_up: CpuGatedLinear,
        down: CpuLinear,
        next_norm: Tensor,
        eps: float,
        following: CpuLinear | None,
    ) -> None:
        self.kernel, self.outputs = o.kernels.tail, following.outputs if following else 0
        self.parts = (o, norm, gate_up, down, next_norm, following)  # own the memory to which the struct points
        next_struct = following.struct if following else PackedWeight()
        norms = norm.data_ptr(), next_norm.data_ptr()
        self.struct = PackedTail(o.struct, gate_up.struct, down.struct, *norms, eps, gate_up.activation, next_struct)
        self.address = ctypes.addressof(self.struct)

    def renew(self) -> None:
        """Its weights have moved."""
        o, _, gate_up, down, _, following = self.parts
        self.struct.o, self.struct.gate_up, self.struct.down = o.struct, gate_up.struct, down.struct
        if following is not None:
            self.struct.next = following.struct

    def __call__(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        attended, x = attended.contiguous(), x.contiguous()
        rows, normed = len(x), torch.empty_like(x)
        y = torch.empty(rows, self.outputs, dtype=x.dtype) if self.outputs else normed
        self.kernel(
            self.address,
            attended.data_ptr(),
            x.data_ptr(),
            normed.data_ptr(),
            y.data_ptr(),
            rows,
            torch.get_num_threads(),
        )
        return x, y


class CpuOps(TorchOps):
    """Operations for a model of `dtype`, a key of ELEMENTS, by the kernels of a level of attention/cpu/level.py; auto:
    the best level. `products`: the matrices that they multiply. Raises NotCompiled if the CPU, the compiler or Linux
    does not support them."""

    def __init__(
        self, level: str = "auto", dtype: torch.dtype = torch.bfloat16, products: Products = "elements"
    ) -> None:
        self.level, self.dtype = best(lambda each: library(each, dtype, products), level), dtype
        self.name = f"our kernels of level {self.level}"
        self.kernels = library(self.level, dtype, products)
        self.block: int = self.kernels.block_outputs()  # outputs of a packed block
        self.step: int = self.kernels.block_inputs()  # inputs of a weight are padded to a multiple of it
        self.memory = HugePages()

    def ours(self, x: Weight) -> bool:
        return x.dtype == self.dtype

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return CpuLinear(self, weight, bias) if self.ours(weight) else super().linear(weight, bias)

    def gated_linear(self, weight: Weight, activation: str = "silu") -> Linear:
        return (
            CpuGatedLinear(self, weight, activation) if self.ours(weight) else super().gated_linear(weight, activation)
        )

    def vocabulary(self, weight: Weight) -> Vocabulary:
        return CpuVocabulary(self, weight) if self.ours(weight) else super().vocabulary(weight)

    def tail(
        self,
        o: Linear,
        norm: Tensor,
        gate_up: Linear,
        down: Linear,
        next_norm: Tensor,
        eps: float,
        following: Linear | None = None,
    ) -> Tail:
        if isinstance(o, CpuLinear) and isinstance(gate_up, CpuGatedLinear) and isinstance(down, CpuLinear):
            whole = not any(part.k % self.step or part.order is not None for part in (o, gate_up, down))
            if (
                whole
                and self.ours(norm)
                and self.ours(next_norm)
                and (following is None or (isinstance(following, CpuLinear) and following.order is None))
            ):
                return CpuTail(o, norm.contiguous(), gate_up, down, next_norm.contiguous(), eps, following)
        return super().tail(o, norm, gate_up, down, next_norm, eps, following)

    def grouped_linear(self, weights: Sequence[Weight]) -> Callable[[Tensor, Tensor], Tensor]:
        if not all(map(self.ours, weights)):
            return super().grouped_linear(weights)
        groups = [CpuLinear(self, weight) for weight in weights]

        def run(x: Tensor, ends: Tensor) -> Tensor:
            y, begin = torch.empty(len(x), groups[0].outputs, dtype=x.dtype), 0
            for group, end in zip(groups, ends.tolist(), strict=True):
                if end > begin:
                    y[begin:end] = group(x[begin:end])
                begin = end
            return y

        return run

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not (self.ours(x) and self.ours(weight)):
            return super().rms_norm(x, weight, eps)
        return self._norm(x.contiguous(), None, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not (self.ours(x) and self.ours(weight)):
            return super().add_rms_norm(x, delta, weight, eps)
        x = x.contiguous()
        return x, self._norm(x, delta.contiguous(), weight, eps)

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of contiguous x, after adding delta to it in place."""
        y, width = torch.empty_like(x), x.shape[-1]
        self.kernels.rms_norm(
            x.data_ptr(),
            width,
            None if delta is None else delta.data_ptr(),
            weight.contiguous().data_ptr(),
            eps,
            x.numel() // width,
            width,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._act_mul(gate_up, "silu") if self.ours(gate_up) else super().silu_mul(gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._act_mul(gate_up, "gelu_tanh") if self.ours(gate_up) else super().gelu_tanh_mul(gate_up)

    def _act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate_up, width = gate_up.contiguous(), gate_up.shape[-1] // 2
        y = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
        self.kernels.act_mul(
            gate_up.data_ptr(),
            y.numel() // width,
            width,
            y.data_ptr(),
            ACTIVATIONS[activation],
            torch.get_num_threads(),
        )
        return y
