"""The machine's ceilings measured with torch in the same run, and the minimum step time that they imply.

    memory   bytes/s of the faster of two reads of 1 GiB: a sum, and a matrix-vector product
    GEMM     FLOP/s of a product [2048, 576] x [576, 3072], prepacked as in the engine, or plain; both in the
             type that the servers compute in
    int8     operations/s of the same product in int8, which ours uses for weights of 4 and 8 bits

    decode   one step of a batch    max((weights + KV read) / memory, FLOP / GEMM)
    prefill  a prompt               max(weights / memory, FLOP / GEMM)

Weights of SmolLM2-135M are 269 MB in bfloat16 and KV 23,040 bytes a token, twice as much in float32; a token costs
212.3 MFLOP in the layers' matrices plus 4 heads head_size FLOP per layer and visible (row, key) pair. The head is
computed for the last row only; prefill excludes it, as well as norms and softmax.

Run as a module, it prints JSON, so that the benchmark's own process loads no torch:

    python -m lab.bench.engine.floors 2 bfloat16
    python -m lab.bench.engine.floors weights
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.model_source import describe
from engine.config.config import EMBEDDED_MODEL
from engine.model.model_config import ModelConfig
from lab.bench.common.machine import cpu
from lab.bench.common.timing import timed
from lab.bench.engine.cases import Case

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PRODUCT = (2048, 576, 3072)
"""Rows, inputs and outputs of the product."""
QUANTIZED_BYTES = {
    "int8": (34 / 32, 34 / 32),
    "int4": (20 / 32, 34 / 32),
    "stored": (20 / 32, 34 / 32),
    "fp8": (1, 2),
    "w8a8": (1, 2),
}
"""--weight-dtype, or w8a8 for that checkpoint -> bytes of a weight of the layers and of the head; `stored` is that of
the embedded model; fp8 and w8a8 leave the head in bfloat16."""
IN_INT8 = ("int8", "int4", "stored", "w8a8")
"""Weights that ours multiplies in int8 where the CPU has such products."""
REPEATS = 7
MEASURED_S = 300.0
"""Until the process that measures has ended; a busy machine needs most of a minute."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's limits."""

    memory_bytes_per_s: float
    gemm_flop_per_s: float
    threads: int
    int8_op_per_s: float = 0.0  # 0: this torch has no such product

    def best(self, other: Ceilings) -> Ceilings:
        """The larger of each."""
        return Ceilings(
            max(self.memory_bytes_per_s, other.memory_bytes_per_s),
            max(self.gemm_flop_per_s, other.gemm_flop_per_s),
            self.threads,
            max(self.int8_op_per_s, other.int8_op_per_s),
        )

    def peak(self, work: Work) -> float:
        """Operations/s of the fastest products that can compute `work`."""
        return max(self.gemm_flop_per_s, self.int8_op_per_s) if work.in_int8 else self.gemm_flop_per_s


@dataclass(frozen=True, slots=True)
class Need:
    """The least that one step or one prompt reads and computes."""

    read_bytes: float
    operations: float
    tokens: int

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.read_bytes / ceilings.memory_bytes_per_s, self.operations / ceilings.gemm_flop_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work per token of this model."""

    weight_bytes: int
    kv_bytes_per_token: int
    flop_per_token: int  # products of the layers' matrices
    flop_per_pair: int  # of a visible (row, key) pair, all layers
    in_int8: bool = False  # whether ours multiplies the weights in int8

    @classmethod
    def of(cls, model: ModelConfig, dtype: str = "bfloat16", weight_dtype: str = "wide") -> Work:
        """`dtype`: of KV, a key of ITEM_BYTES, and of weights unless `weight_dtype` is a key of QUANTIZED_BYTES."""
        item = ITEM_BYTES[dtype]
        layers, last = QUANTIZED_BYTES.get(weight_dtype, (item, item))
        attention = 2 * model.hidden_size * (model.num_heads + model.num_kv_heads) * model.head_size
        matrices = model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
        head = model.vocab_size * model.hidden_size
        kv = 2 * model.num_layers * model.num_kv_heads * model.head_size * item
        pair = 4 * model.num_layers * model.num_heads * model.head_size
        return cls(int(layers * matrices + last * head), kv, 2 * matrices, pair, weight_dtype in IN_INT8)

    def decode(self, batch: int, context: float) -> Need:
        """One step of `batch` requests with `context` tokens each."""
        read = self.weight_bytes + batch * context * self.kv_bytes_per_token
        return Need(read, batch * (self.flop_per_token + context * self.flop_per_pair), batch)

    def prefill(self, new: int, past: int = 0) -> Need:
        """`new` tokens after `past` cached ones."""
        flop = new * self.flop_per_token + (new * past + new * (new + 1) / 2) * self.flop_per_pair
        return Need(self.weight_bytes + past * self.kv_bytes_per_token, flop, new)


def need_of(case: Case, metric: str, work: Work) -> Need:
    """Of a step, or of a prompt. For the open loop: of a request alone on the machine."""
    if metric.startswith("TPOT"):
        return work.decode(case.count if case.section == "decode" else 1, case.prompt_len + case.output_len / 2)
    if metric == "TTFT second":
        return work.prefill(case.prompt_len - case.shared_len, case.shared_len)
    return work.prefill(case.prompt_len)


def floor_ms(case: Case, metric: str, work: Work, ceilings: Ceilings) -> float:
    """The floor in milliseconds."""
    return 1000 * need_of(case, metric, work).seconds(ceilings)


def measure(threads: int, dtype: str = "bfloat16", matrix_rows: int = 1 << 16) -> Ceilings:
    """Measures in this process. Takes seconds, and 16 or 32 KiB for each row of the matrix that is read."""
    import torch

    kind = getattr(torch, dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    rows, inputs, outputs = PRODUCT
    x, w = torch.randn(rows, inputs).to(kind), torch.randn(outputs, inputs).to(kind)
    product_s = min(fastest(lambda: torch.nn.functional.linear(x, w)), packed_s(x, w))
    matrix, vector = torch.ones(matrix_rows, 1 << 13, dtype=kind), torch.ones(1 << 13, dtype=kind)
    read_s = min(fastest(matrix.view(torch.int64).sum), fastest(lambda: torch.mv(matrix, vector)))
    operations = 2 * rows * inputs * outputs
    return Ceilings(matrix.nbytes / read_s, operations / product_s, threads, operations / int8_s(x, w))


def int8_s(x: torch.Tensor, w: torch.Tensor) -> float:
    """Seconds of the product of int8 elements, summed in int32; infinite if this torch has no such product."""
    import torch

    a, b = x.to(torch.int8), w.to(torch.int8).t()
    try:
        return fastest(lambda: torch._int_mm(a, b))
    except (AttributeError, RuntimeError):
        return float("inf")


def packed_s(x: torch.Tensor, w: torch.Tensor) -> float:
    """Seconds of the product with oneDNN's own weight layout; infinite if this torch has no such product."""
    import torch

    try:
        ready = torch.ops.mkldnn._reorder_linear_weight(w, None)
    except (AttributeError, RuntimeError):
        return float("inf")
    return fastest(lambda: torch.ops.mkldnn._linear_pointwise(x, ready, None, "none", [], ""))


def fastest(call: Callable[[], object]) -> float:
    return min(timed(call, REPEATS))


def measured_elsewhere(threads: int, dtype: str = "bfloat16") -> Ceilings:
    """Measures in a separate process. Raises RuntimeError with its error output."""
    return Ceilings(**_elsewhere(str(threads), dtype))


def chosen_weights() -> str:
    """What --weight-dtype auto means for the embedded model on this CPU."""
    return str(_elsewhere("weights"))


def _elsewhere(*arguments: str) -> Any:
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", "lab.bench.engine.floors", *arguments]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=MEASURED_S)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"the ceilings could not be measured in {MEASURED_S:.0f} s") from late
    if done.returncode:
        raise RuntimeError(f"the ceilings could not be measured:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _weights() -> str:
    import torch

    from engine.loading.weight_type import weight_type

    dtype = torch.bfloat16 if {"avx512_bf16", "amx_bf16"} & set(cpu()[1]) else torch.float32
    return weight_type(describe(EMBEDDED_MODEL), "cpu", dtype, "auto")


if __name__ == "__main__":
    found = _weights() if sys.argv[1] == "weights" else asdict(measure(int(sys.argv[1]), sys.argv[2]))
    print(json.dumps(found))
