"""The machine's ceilings measured with torch in the same run, and the minimum step time that they imply.

    memory   bytes/s of the faster of two reads of 1 GiB: a sum, and a matrix-vector product
    GEMM     FLOP/s of a product [2048, 576] x [576, 3072], prepacked as in the engine, or plain; both in the
             type that the servers compute in

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
QUANTIZED_BYTES = {
    "int8": (34 / 32, 34 / 32),
    "int4": (20 / 32, 34 / 32),
    "stored": (20 / 32, 34 / 32),
    "fp8": (1, 2),
    "w8a8": (1, 2),
}
"""--weight-dtype, or w8a8 for that checkpoint -> bytes of a weight of the layers and of the head; `stored` is that of
the embedded model; fp8 and w8a8 leave the head in bfloat16."""
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's limits."""

    memory_bytes_per_s: float
    gemm_flop_per_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work per token of this model."""

    weight_bytes: int
    kv_bytes_per_token: int
    flop_per_token: int  # products of the layers' matrices
    flop_per_pair: int  # of a visible (row, key) pair, all layers

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
        return cls(int(layers * matrices + last * head), kv, 2 * matrices, pair)

    def decode_s(self, ceilings: Ceilings, batch: int, context: float) -> float:
        """One step of `batch` requests with `context` tokens each."""
        read = self.weight_bytes + batch * context * self.kv_bytes_per_token
        flop = batch * (self.flop_per_token + context * self.flop_per_pair)
        return max(read / ceilings.memory_bytes_per_s, flop / ceilings.gemm_flop_per_s)

    def prefill_s(self, ceilings: Ceilings, new: int, past: int = 0) -> float:
        """`new` tokens after `past` cached ones."""
        flop = new * self.flop_per_token + (new * past + new * (new + 1) / 2) * self.flop_per_pair
        read = self.weight_bytes + past * self.kv_bytes_per_token
        return max(read / ceilings.memory_bytes_per_s, flop / ceilings.gemm_flop_per_s)


def floor_ms(case: Case, metric: str, work: Work, ceilings: Ceilings) -> float:
    """The floor in milliseconds. For the open loop: of a request alone on the machine."""
    if metric.startswith("TPOT"):
        batch = case.count if case.section == "decode" else 1
        return 1000 * work.decode_s(ceilings, batch, case.prompt_len + case.output_len / 2)
    if metric == "TTFT second":
        return 1000 * work.prefill_s(ceilings, case.prompt_len - case.shared_len, case.shared_len)
    return 1000 * work.prefill_s(ceilings, case.prompt_len)


def measure(threads: int, dtype: str = "bfloat16", matrix_rows: int = 1 << 16) -> Ceilings:
    """Measures in this process. Takes seconds, and 16 or 32 KiB for each row of the matrix that is read."""
    import torch

    kind = getattr(torch, dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    x, w = torch.randn(2048, 576).to(kind), torch.randn(3072, 576).to(kind)
    product_s = min(fastest(lambda: torch.nn.functional.linear(x, w)), packed_s(x, w))
    matrix, vector = torch.ones(matrix_rows, 1 << 13, dtype=kind), torch.ones(1 << 13, dtype=kind)
    read_s = min(fastest(matrix.view(torch.int64).sum), fastest(lambda: torch.mv(matrix, vector)))
    return Ceilings(matrix.nbytes / read_s, 2 * 2048 * 576 * 3072 / product_s, threads)


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
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
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
