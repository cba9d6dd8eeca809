"""The engine's own model and step metadata over these kernels: the logits of the torch backend."""

from __future__ import annotations

import pytest
import torch

from attention.interface import AttentionBackend
from attention.torch_backend import TorchBackend
from attention.triton.backend import TritonBackend
from attention.triton.tiles import Tile, Tiles
from engine.model.decoder import Model
from engine.model.graphs import Bucket, CudaRecorder, GraphedModel, StaticStep
from engine.model.model_config import ModelConfig
from engine.model.ops.interface import TorchOps
from engine.model.ops.triton import TritonOps
from engine.step.inputs import InputBuilder, Inputs, Row
from tests.attention.interpreted.cases import DEVICE

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=64,
    vocab_size=50,
    tie_word_embeddings=True,
)
BLOCK_SIZE = 16
TILES = Tiles(Tile(16, 16, 4, 2, min_chunk=16), Tile(32, 16, 4, 2))


def weights() -> dict[str, torch.Tensor]:
    """Of CONFIG, random, the same at every call."""
    generator = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    hidden, wide = CONFIG.hidden_size, CONFIG.intermediate_size
    q, kv = CONFIG.num_heads * CONFIG.head_size, CONFIG.num_kv_heads * CONFIG.head_size
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes |= {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    named = {"embed": matrix(CONFIG.vocab_size, hidden), "norm": torch.ones(hidden)}
    for layer in range(CONFIG.num_layers):
        named |= {f"layers.{layer}.{name}": matrix(*shape) for name, shape in shapes.items()}
        named |= {f"layers.{layer}.{name}": torch.ones(hidden) for name in ("attn_norm", "mlp_norm")}
    return named


def make_pool() -> torch.Tensor:
    shape = (8, CONFIG.num_layers, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_size)
    return torch.full(shape, torch.nan, device=DEVICE)


def last_rows(inputs: Inputs) -> torch.Tensor:
    """Of every request: these rows ask for no tokens, so the step itself asks for no logits."""
    return inputs.batch.cu_q[1:].long() - 1


def logits_of(backend: AttentionBackend, steps: list[list[Row]], ops: TorchOps) -> list[torch.Tensor]:
    model = Model(CONFIG, weights(), backend, DEVICE, ops)
    pool = make_pool()
    results = []
    for rows in steps:
        inputs = InputBuilder(BLOCK_SIZE, torch.device(DEVICE)).build(rows)
        results.append(model.forward(inputs.token_ids, inputs.batch, pool, last_rows(inputs), None))
    return results


def test_chunks_and_decodes_of_a_model() -> None:
    prompt, other = [*range(1, 31)], [7, 3, 9, 4, 4]
    steps = [
        [Row(prompt[:20], 0, [5, 2])],
        [Row(prompt[20:], 20, [5, 2]), Row(other, 0, [7])],
        [Row([11], 30, [5, 2]), Row([12], 5, [7])],
        [Row([13], 31, [5, 2]), Row([14, 15, 16], 6, [7]), Row([1], 0, [3])],
    ]
    ours = logits_of(TritonBackend(tiles=TILES), steps, TritonOps())
    theirs = logits_of(TorchBackend(), steps, TorchOps())
    for step, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"{step}: {text}")


@pytest.mark.parametrize("bucket", [Bucket(5, 4, 16), Bucket(3), Bucket(0, 3, 12, longest=4)], ids=str)
def test_a_step_padded_for_a_graph(bucket: Bucket) -> None:
    """The same logits and the same KV: padding rows write nothing, NaN in the pool harms nobody."""
    model = Model(CONFIG, weights(), TritonBackend(tiles=TILES), DEVICE, TritonOps())
    pool, padded_pool = make_pool(), make_pool()
    static = StaticStep(bucket, 16, BLOCK_SIZE, torch.device(DEVICE))
    steps = [[Row([1], 0, [5]), Row([2], 0, [7])], [Row([11], 1, [5])], [Row([9], 2, [5]), Row([12, 13, 14], 1, [7])]]
    for rows in steps if bucket.chunks else steps[:2]:
        inputs = InputBuilder(BLOCK_SIZE, torch.device(DEVICE)).build(rows)
        static.load(inputs.token_ids, inputs.batch, last_rows(inputs))
        expected = model.forward(inputs.token_ids, inputs.batch, pool, last_rows(inputs))
        logits = model.forward(static.token_ids, static.batch, padded_pool, static.rows)
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded_pool, pool, equal_nan=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are recorded on a GPU")
def test_recorded_graphs_replay_other_steps() -> None:
    """Greedy logits of decodes and small mixed steps, by replay and by the model itself."""
    model = Model(CONFIG, weights(), TritonBackend(), DEVICE, TritonOps())
    pool, other = make_pool().nan_to_num_(0.5), make_pool().nan_to_num_(0.5)
    graphed = GraphedModel(model, pool, BLOCK_SIZE, CudaRecorder(), max_num_seqs=3, max_model_len=64)
    steps = [[Row([1, 2, 3], 0, [5])], [Row([4], 3, [5])], [Row([5], 4, [5]), Row([6, 7], 0, [2])], [Row([8], 5, [5])]]
    for rows in steps:
        inputs = InputBuilder(BLOCK_SIZE, torch.device(DEVICE)).build(rows)
        assert graphed.find(inputs.batch, len(last_rows(inputs))) is not None
        expected = model.forward(inputs.token_ids, inputs.batch, other, last_rows(inputs))
        logits = graphed.forward(inputs.token_ids, inputs.batch, pool, last_rows(inputs))
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(pool, other, rtol=1e-3, atol=1e-3)
