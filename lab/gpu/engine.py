"""Measures whole steps of Llama-3-8B's geometry, with random weights made on the GPU. Decode is compared with the
time of its bytes at the measured copy bandwidth, prefill with the measured GEMM rate."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from attention.interface import RaggedBatch
from attention.triton.backend import TritonBackend
from engine.model.decoder import Model
from engine.model.graphs import CudaRecorder, GraphedModel
from engine.model.model_config import ModelConfig
from engine.model.ops.triton import TritonOps
from lab.bench.attention.cases import LLAMA_8B, Case, batch_of
from lab.bench.attention.timing import copy_rate, gemm_rate
from lab.gpu.checks import Check, failed, skipped

CONFIG = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    intermediate_size=14336,
    vocab_size=128_256,
    rope_theta=500_000.0,
    max_position_embeddings=131_072,
)
BLOCK_SIZE = 16
DECODES = tuple((batch, context) for context in (1024, 8192) for batch in (1, 32, 128))
VERIFIED = (8, 1024, 5)
"""Requests, their context, and rows of each in a step that verifies drafts."""
PREFILL = 8192
DECODE_GOAL, PREFILL_GOAL = 0.85, 0.55
PEER_BATCH, PEER_CONTEXT = 32, 1024
KV_SHARE = 0.8
"""Share of the memory after the weights; activations and graphs take the rest."""
REPEATS = 10


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of engine/checkpoint/weights.py for this family; that module needs packages that a bare GPU machine
    lacks."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}
    layer |= {
        "o": (hidden, q),
        "mlp_norm": (hidden,),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
    layers = {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    vocabulary = (config.vocab_size, hidden)
    return {"embed": vocabulary, **layers, "norm": (hidden,), "lm_head": vocabulary}


def random_weights(config: ModelConfig, device: str) -> dict[str, Tensor]:
    """Normal numbers that keep activations near 1, bfloat16."""

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=shape[1] ** -0.5)

    return {name: weight(name, shape) for name, shape in shapes(config).items()}


def kv_token_bytes(config: ModelConfig) -> int:
    """K and V of one token in all layers, bfloat16."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_size * 2


def decode_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Bytes that a decode step must read: every weight except the embedding's once, and the KV of every context."""
    weights = sum(torch.Size(shape).numel() for name, shape in shapes(config).items() if name != "embed")
    return 2 * weights + batch * context * kv_token_bytes(config)


def prefill_operations(config: ModelConfig, tokens: int) -> int:
    """Multiplications and additions of a prompt; the head computes its last token only."""
    sized = {name: torch.Size(shape).numel() for name, shape in shapes(config).items() if len(shape) == 2}
    head = sized.pop("lm_head")
    sized.pop("embed")
    attention: int = config.num_layers * Case(LLAMA_8B, 1, tokens, tokens).operations
    return 2 * tokens * sum(sized.values()) + 2 * head + attention


def median_seconds(run: Callable[[], object]) -> float:
    """Median seconds of whole calls, including the host side."""
    times: list[float] = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def measure() -> Iterator[Check]:
    gb_s, tflop_s = copy_rate(), gemm_rate()
    yield Check("engine", "device copy", "GB/s", gb_s)
    yield Check("engine", "bf16 GEMM 8192", "TFLOP/s", tflop_s)
    model = Model(CONFIG, random_weights(CONFIG, "cuda"), TritonBackend(), "cuda", TritonOps())
    free, _ = torch.cuda.mem_get_info()
    tokens = int(free * KV_SHARE) // kv_token_bytes(CONFIG)
    fitting = [(batch, context) for batch, context in DECODES if batch * context <= tokens]
    num_blocks = max([PREFILL, *(batch * context for batch, context in fitting)]) // BLOCK_SIZE
    shape = (num_blocks, CONFIG.num_layers, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_size)
    pool = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    yield prefill_check(model, pool, tflop_s)
    sizes = {"max_num_seqs": 128, "max_model_len": 8192, "max_drafts": VERIFIED[2] - 1}
    graphed = GraphedModel(model, pool, BLOCK_SIZE, CudaRecorder(), **sizes)
    ours = None
    for batch, context in fitting:
        check = decode_check(graphed, pool, batch, context, gb_s)
        if (batch, context) == (PEER_BATCH, PEER_CONTEXT):
            ours = check.measured
        yield check
    for batch, context in (case for case in DECODES if case not in fitting):
        size = batch * context * kv_token_bytes(CONFIG) / 1e9
        yield skipped("engine", f"decode {batch} x {context}", f"{size:.0f} GB of KV do not fit after the weights")
    yield verify_check(graphed, pool, gb_s)
    yield eager_check(model, pool)
    del graphed, model, pool
    gc.collect()
    torch.cuda.empty_cache()
    yield peer_check(ours)


def inputs_of(batch: int, context: int, chunk: int) -> tuple[Tensor, RaggedBatch, Tensor]:
    """Random tokens, the ragged batch, and the last row of every request."""
    ragged, _ = batch_of(Case(LLAMA_8B, batch, context, chunk), BLOCK_SIZE, "cuda")
    token_ids = torch.randint(CONFIG.vocab_size, (batch * chunk,), device="cuda")
    return token_ids, ragged, torch.arange(chunk - 1, batch * chunk, chunk, device="cuda")


def decode_check(graphed: GraphedModel, pool: Tensor, batch: int, context: int, gb_s: float) -> Check:
    token_ids, ragged, rows = inputs_of(batch, context, 1)
    seconds = median_seconds(lambda: graphed.forward(token_ids, ragged, pool, rows).argmax(-1))
    floor = decode_bytes(CONFIG, batch, context) / gb_s / 1e6
    return Check("engine", f"decode {batch} x {context}", "ms", seconds * 1e3, floor, DECODE_GOAL, lower_is_better=True)


def verify_check(graphed: GraphedModel, pool: Tensor, gb_s: float) -> Check:
    """A step that verifies drafts reads what a decode step reads, and has the logits of every row."""
    batch, context, chunk = VERIFIED
    token_ids, ragged, _ = inputs_of(batch, context, chunk)
    rows = torch.arange(batch * chunk, device="cuda")
    seconds = median_seconds(lambda: graphed.forward(token_ids, ragged, pool, rows).argmax(-1))
    floor = decode_bytes(CONFIG, batch, context) / gb_s / 1e6
    what = f"verify {chunk - 1} drafts, {batch} x {context}"
    return Check("engine", what, "ms", seconds * 1e3, floor, DECODE_GOAL, lower_is_better=True)


def eager_check(model: Model, pool: Tensor) -> Check:
    """A step without CUDA graphs, to show what they save."""
    token_ids, ragged, rows = inputs_of(1, 1024, 1)
    seconds = median_seconds(lambda: model.forward(token_ids, ragged, pool, rows).argmax(-1))
    return Check("engine", "decode 1 x 1024 without graphs", "ms", seconds * 1e3)


def prefill_check(model: Model, pool: Tensor, tflop_s: float) -> Check:
    token_ids, ragged, rows = inputs_of(1, PREFILL, PREFILL)
    seconds = median_seconds(lambda: model.forward(token_ids, ragged, pool, rows).argmax(-1))
    rate = prefill_operations(CONFIG, PREFILL) / seconds / 1e12
    return Check("engine", f"prefill {PREFILL}", "TFLOP/s", rate, tflop_s, PREFILL_GOAL)


def peer_check(ours_ms: float | None) -> Check:
    """A decode step of transformers' continuous batching at the same batch and context."""
    what = f"decode {PEER_BATCH} x {PEER_CONTEXT} against transformers continuous batching"
    if find_spec("transformers") is None:
        return skipped("engine", what, "transformers is not installed")
    from lab.gpu.transformers_peer import decode_step_seconds

    try:
        theirs = decode_step_seconds(CONFIG, PEER_BATCH, PEER_CONTEXT)
    except Exception as error:  # another project's code: any error must not lose our lines
        return skipped("engine", what, f"{type(error).__name__} in transformers: {error}")
    if ours_ms is None:
        return failed("engine", what, "our own step was not measured")
    return Check("engine", what, "ms", ours_ms, theirs * 1e3, lower_is_better=True)
