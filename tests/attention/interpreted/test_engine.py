"""The engine's own model and step metadata over these kernels: the logits of the torch backend."""

from __future__ import annotations

import torch

from attention.interface import AttentionBackend
from attention.tiles import Tile, Tiles
from attention.torch_backend import TorchBackend
from attention.triton_backend import TritonBackend
from engine.inputs import Row, build_inputs
from engine.model import Model
from engine.model_config import ModelConfig

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


def logits_of(backend: AttentionBackend, steps: list[list[Row]]) -> list[torch.Tensor]:
    model = Model(CONFIG, weights(), backend)
    pool = torch.full((8, CONFIG.num_layers, 2, CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_size), torch.nan)
    results = []
    for rows in steps:
        inputs = build_inputs(rows, BLOCK_SIZE, torch.device("cpu"))
        results.append(model.forward(inputs.token_ids, inputs.batch, pool, inputs.last_rows, None))
    return results


def test_chunks_and_decodes_of_a_model() -> None:
    prompt, other = [*range(1, 31)], [7, 3, 9, 4, 4]
    steps = [
        [Row(prompt[:20], 0, [5, 2])],
        [Row(prompt[20:], 20, [5, 2]), Row(other, 0, [7])],
        [Row([11], 30, [5, 2]), Row([12], 5, [7])],
        [Row([13], 31, [5, 2]), Row([14, 15, 16], 6, [7]), Row([1], 0, [3])],
    ]
    ours = logits_of(TritonBackend(tiles=Tiles(Tile(16, 16, 4, 2, min_chunk=16), Tile(32, 16, 4, 2))), steps)
    theirs = logits_of(TorchBackend(), steps)
    for step, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"{step}: {text}")
