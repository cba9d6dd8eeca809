"""The gated delta rule against its definition in float64: any length, pieces and cuts, strong and weak decays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention import delta_rule
from attention.delta_rule import PIECE
from attention.states import StateSlots, memory_of

LENGTHS = (1, 2, 17, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5)
HEADS = ((1, 1, 8, 8), (2, 4, 16, 8), (2, 6, 8, 24))  # key heads, value heads, key size, value size
DECAYS = (0.0, 0.05, 3.0, 40.0)  # mean of -g
GRID = [
    (num_tokens, HEADS[i % len(HEADS)], decay) for num_tokens in LENGTHS for i, decay in enumerate(DECAYS, num_tokens)
]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(
    num_tokens: int, heads: tuple[int, int, int, int], decay: float, seed: int = 0, channels: bool = False
) -> Inputs:
    """q, k, v, decay, rate, state in float64. channels: a decay for each channel of a key."""
    key_heads, value_heads, key_size, value_size = heads
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    keys = (num_tokens, key_heads, key_size)
    q, k, v = normal(*keys), normal(*keys), normal(num_tokens, value_heads, value_size)
    shape = (num_tokens, value_heads, key_size) if channels else (num_tokens, value_heads)
    g = -2 * decay * torch.rand(shape, generator=random, dtype=torch.float64)
    rate = normal(num_tokens, value_heads).sigmoid()
    return q, k, v, g, rate, normal(value_heads, key_size, value_size)


def defined(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token and one head after another, as the paper has it."""
    each, out, state = v.shape[1] // k.shape[1], torch.zeros_like(v), state.clone()
    for t in range(len(q)):
        for head in range(v.shape[1]):
            key, query = (x[t, head // each] / (x[t, head // each].square().sum() + 1e-6).sqrt() for x in (k, q))
            before = decay[t, head].exp().view(-1, 1) * state[head]
            state[head] = before + torch.outer(key, rate[t, head] * (v[t, head] - before.T @ key))
            out[t, head] = state[head].T @ query / len(query) ** 0.5
    return out, state


@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize(("num_tokens", "heads", "decay"), GRID)
def test_both_forms_compute_what_is_defined(num_tokens, heads, decay, channels):
    given = inputs(num_tokens, heads, decay, num_tokens, channels)
    out, state = defined(*given)
    for dtype, near in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        typed = [x.to(dtype) for x in given]
        ours, after = delta_rule.chunk(*typed)
        assert ours.dtype == after.dtype == dtype
        torch.testing.assert_close(ours.double(), out, atol=near, rtol=near)
        torch.testing.assert_close(after.double(), state, atol=near, rtol=near)
        *tokens, held = typed
        held = held[None].clone()
        steps = [delta_rule.step(*(x[t : t + 1] for x in tokens), held)[0] for t in range(num_tokens)]
        torch.testing.assert_close(torch.stack(steps).double(), out, atol=near, rtol=near)
        torch.testing.assert_close(held[0].double(), state, atol=near, rtol=near)


@pytest.mark.parametrize("channels", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("cut", [1, 30, PIECE, PIECE + 20])
def test_a_cut_anywhere_changes_nothing(cut, channels):
    *tokens, state = inputs(150, HEADS[1], 0.5, channels=channels)
    whole, after = delta_rule.chunk(*tokens, state)
    first, between = delta_rule.chunk(*(x[:cut] for x in tokens), state)
    second, end = delta_rule.chunk(*(x[cut:] for x in tokens), between)
    torch.testing.assert_close(torch.cat((first, second)), whole)
    torch.testing.assert_close(end, after)


def test_requests_of_a_step_are_apart():
    *tokens, _ = inputs(3, HEADS[1], 0.5)
    states = torch.stack([inputs(1, HEADS[1], 0.5, seed)[-1] for seed in range(3)])
    alone = [states[i : i + 1].clone() for i in range(3)]
    together = delta_rule.step(*tokens, states)
    for i in range(3):
        torch.testing.assert_close(together[i], delta_rule.step(*(x[i : i + 1] for x in tokens), alone[i])[0])
        torch.testing.assert_close(states[i], alone[i][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_in_pieces_is_read_as_it_was_written(dtype):
    """Two pieces in blocks of two parts; what lies beside them stays."""
    pool = torch.zeros(6, 2, 2, 1, 4, 4, dtype=dtype)
    memory = memory_of(pool)
    slots = StateSlots(((0, 5, memory.shape[1]), (1, 0, 3)))
    blocks, states = torch.tensor([[4, 1], [0, 5]]), torch.randn(2, memory.shape[1] - 5 + 3)
    slots.write(memory, blocks, states)
    assert torch.equal(slots.read(memory, blocks), states)
    assert int((memory != 0).sum()) == states.numel()
    assert memory.data_ptr() == pool.data_ptr()
